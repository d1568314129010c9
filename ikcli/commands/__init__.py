"""One file per subcommand: parse, one library call, print."""

"""The command line: arguments, parser, help, suggestions, completion, environment, preset files of other programs."""

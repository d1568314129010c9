"""`ik --show-completion [SHELL]` and `ik --install-completion [SHELL]`: the scripts of Typer."""

from __future__ import annotations

from ikcli.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def run(argv: list[str]) -> int:
    """Print the completion script of `ik`, or install it where the shell reads it at its start."""
    from typer.completion import get_completion_script, install

    option = argv[0]
    if len(argv) > 2:
        raise UsageError(f"{option} takes the name of one shell: {', '.join(SHELLS)}")
    shell = argv[1].lower() if len(argv) == 2 else _this_shell()
    if shell not in SHELLS:
        what = f"no completion for {shell or 'this shell'}" if len(argv) == 2 else "cannot tell the shell"
        raise UsageError(f"{what}; name one: ik {option} {'|'.join(SHELLS)}")
    if option == "--show-completion":
        print(get_completion_script(prog_name="ik", complete_var="_IK_COMPLETE", shell=shell))
    else:
        _, path = install(shell=shell, prog_name="ik", complete_var="_IK_COMPLETE")
        print(f"completion for {shell} is in {path}; it works in shells that are started from now on")
    return 0


def _this_shell() -> str:
    try:
        import shellingham

        return str(shellingham.detect_shell()[0])
    except (ImportError, RuntimeError, OSError):
        return ""

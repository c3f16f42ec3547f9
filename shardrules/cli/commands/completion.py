"""`shardrules completion`: a script for the shell. It is made of the commands themselves, so it knows all of them."""

import argparse

from shardrules.cli.command import FINE, Command
from shardrules.cli.registry import COMMANDS, load_command
from shardrules.cli.terminal import show

_SHELLS = ("bash", "zsh", "fish")


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")


def _run(args: argparse.Namespace) -> int:
    options = {name: _options(load_command(name).parser()) for name in COMMANDS}
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]
    show(make(dict(COMMANDS), options))
    return FINE


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str, list[str]]]:
    """Each option with what it means, and the words that may stand behind it; "" is for words without an option."""
    return [
        (name, (action.help or "").partition(";")[0], list(action.choices or ()))
        for action in parser._actions
        for name in action.option_strings[-1:] or ([""] if action.choices else [])
    ]


def _bash(commands: dict[str, str], options: dict[str, list[tuple[str, str, list[str]]]]) -> str:
    cases = "\n".join(
        f"        {name}) words='{' '.join(option for option, _, _ in known if option)}' ;;"
        for name, known in options.items()
    )
    values = "\n".join(
        f"        {name}:{option or name}) words='{' '.join(choices)}' ;;"
        for name, known in options.items()
        for option, _, choices in known
        if choices
    )
    return f"""\
# bash completion of shardrules: source <(shardrules completion bash)
_shardrules() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '{" ".join(commands)}' -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}}:$before in
{values}
    esac
    if [[ -z $words && $word == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")  # names may hold blanks
    fi
}}
complete -o filenames -F _shardrules shardrules"""


def _zsh(commands: dict[str, str], options: dict[str, list[tuple[str, str, list[str]]]]) -> str:
    listed = "\n".join(f"        '{name}:{_plain(summary)}'" for name, summary in commands.items())
    cases = "\n".join(
        f"        {name}) _arguments {' '.join(_zsh_option(*one) for one in known)} '*:file:_files' ;;"
        for name, known in options.items()
    )
    return f"""\
#compdef shardrules
# zsh completion of shardrules: shardrules completion zsh > "${{fpath[1]}}/_shardrules"
_shardrules() {{
    local -a commands=(
{listed}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
{cases}
    esac
}}
if [ "$funcstack[1]" = _shardrules ]; then
    _shardrules "$@"
elif (( $+functions[compdef] )); then
    compdef _shardrules shardrules
fi"""


def _zsh_option(name: str, meaning: str, choices: list[str]) -> str:
    if not name:
        return f"'1:{_plain(meaning)}:({' '.join(choices)})'"
    values = f":value:({' '.join(choices)})" if choices else ":value:_files" if name != "--help" else ""
    return f"'{name}[{_plain(meaning)}]{values}'"


def _fish(commands: dict[str, str], options: dict[str, list[tuple[str, str, list[str]]]]) -> str:
    lines = ["# fish completion of shardrules: shardrules completion fish | source"]
    lines += [
        f"complete -c shardrules -n __fish_use_subcommand -f -a {name} -d '{_plain(summary)}'"
        for name, summary in commands.items()
    ]
    for command, known in options.items():
        for name, meaning, choices in known:
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            if not name:
                lines.append(f"complete -c shardrules -n '__fish_seen_subcommand_from {command}'{values}")
                continue
            lines.append(
                f"complete -c shardrules -n '__fish_seen_subcommand_from {command}' "
                f"-l {name.removeprefix('--')}{values} -d '{_plain(meaning)}'"
            )
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A text that may stand in quotes and brackets of a shell."""
    return "".join(char for char in text if char not in "'\"[]:\\$`%")


COMMAND = Command(
    "completion",
    "Prints a script that completes commands and options in a shell.",
    "SHELL",
    ("completion bash",),
    _declare,
    _run,
)
"""What `shardrules completion` is."""

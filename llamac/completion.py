"""`llamac completion bash|zsh` prints a shell script that completes commands, flags and files."""

from llamac.__main__ import COMMANDS
from llamac.base.arguments import Parser

# The flags are those that --help names, so they need no list here.
_FUNCTION = """\
_llamac() {
    local word="${COMP_WORDS[COMP_CWORD]}" program="${COMP_WORDS[0]}" words="" flag='--[a-z][a-z0-9-]*'
    if [ "${program##*/}" = train_llama3 ]; then
        case "$word" in -*) words=$("$program" --help 2>/dev/null | grep -oE -- "$flag" | sort -u) ;; esac
    elif [ "$COMP_CWORD" = 1 ]; then
        words="%s"
    else
        case "$word" in
            -*) words=$("$program" "${COMP_WORDS[1]}" --help 2>/dev/null | grep -oE -- "$flag" | sort -u) ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _llamac llamac train_llama3
"""
_BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def script(shell: str) -> str:
    return _BEFORE[shell] + _FUNCTION % " ".join(COMMANDS)


def main() -> None:
    where = 'eval "$(llamac completion bash)" in ~/.bashrc, or\neval "$(llamac completion zsh)" in ~/.zshrc'
    parser = Parser("completion", f"Print the completion script of a shell: {where}, after compinit.")
    parser.add_argument("shell", choices=list(_BEFORE))
    print(script(parser.parse_args().shell), end="")

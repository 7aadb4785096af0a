"""Chat templates: convert a conversation to a model's text format, with the template of its directory or one
of TEMPLATES."""

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llamac.base import limited
from llamac.base.arguments import Parser
from llamac.base.errors import InputError, requires
from llamac.base.files import check_text, read_json, read_text
from llamac.data import special_tokens

# What stands around the text of a {% generation %} block while it is rendered: characters that no text has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_KIND = {"chat_template": (str, [{"name": str, "template": str}], None)}
# Around the number of a message, behind its content.
_MARK = "\ufdd2{}\ufdd3"
_MARKS = re.compile(_MARK.format(r"(\d+)"))
# Names of a message's reasoning; templates read the first, and some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
# The choices of --template: the marker that ends a message, and the source.
TEMPLATES = {
    "chatml": (
        "<|im_end|>",
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama3": (
        "<|eot_id|>",
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
}


class Refused(InputError):
    """The template does not write this conversation, or not in a way that its answers can be found."""


@dataclass(frozen=True)
class Template:
    """path: of the file that it stands in. source: Jinja, as transformers takes it. tokens: texts of special
    tokens by their roles. tool_source: of the one for conversations with tools, where there are two. end: the
    text that ends a message, if the template is one of TEMPLATES."""

    path: Path
    source: str
    tokens: dict[str, str] = field(default_factory=dict)
    tool_source: str = ""
    end: str = ""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tokenizer: Any = None,
        answer_begins: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """(The text of messages, {"role": ..., "content": ...} each, as `apply_chat_template` of transformers
        renders it; where in it answers begin and end, in characters.) Answers are the {% generation %} blocks
        of the template; most have none. answer_begins: the text ends with the beginning of the assistant's
        next message. tokenizer: names the tokens that the directory does not. Raises InputError."""
        names = {} if tokenizer is None else tokenizer.names
        arguments = list(messages), names | self.tokens, answer_begins, tools
        text, refusal = limited.call(f"{self.path}: chat template", self._rendered, *arguments)
        if refusal:
            raise Refused(f"{self.path}: chat template: {refusal}")
        return _without_marks(text)

    def turns(
        self, text: str, messages: Sequence[dict[str, Any]], wanted: Sequence[int], tokenizer: Any, tools: Any
    ) -> list[tuple[int, int]]:
        """Where in the text of these messages each of the wanted ones begins, behind what asks for it, and
        ends, in characters. Raises Refused."""
        found = _Turns(self, text, messages, tokenizer, tools)
        return [(found.begin(i), found.end(i)) for i in wanted]

    def names(self, word: str) -> bool:
        """Whether the source has the word, as one."""
        return re.search(rf"\b{re.escape(word)}\b", self.source + "\n" + self.tool_source) is not None

    def _rendered(
        self, messages: list[dict[str, Any]], tokens: dict[str, str], answer_begins: bool, tools: Any
    ) -> tuple[str, str]:
        """(the text with marks, why the template refuses the messages)."""
        template = _compiled(self.path, self.tool_source if tools and self.tool_source else self.source)
        try:
            text = template.render(
                messages=[_as_read(message) for message in messages],
                add_generation_prompt=answer_begins,
                tools=tools,
                documents=None,
                **tokens,
            )
        except Exception as error:  # whatever its expressions raise
            return "", str(error) or type(error).__name__
        return text, ""


@cache
def _compiled(path: Path, source: str) -> Any:
    """As transformers compiles it."""
    requires("jinja2", f"{path}: the chat template")
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # whatever its constants raise
        raise InputError(f"{path}: chat template: {str(error) or type(error).__name__}") from None


def _as_read(message: Any) -> Any:
    """A message as transformers gives it to a template: without nulls, its reasoning by the usual names."""
    if not isinstance(message, dict):
        return message
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Turns:
    """Where the messages of a conversation stand in its text. Marks behind their contents, in a second
    rendering, show where these end, and the ends of a few shorter conversations what a template writes
    behind a content. So the time is linear in the number of messages. Where a template does not take marks,
    each turn is found by the rendering of what precedes it."""

    def __init__(
        self, template: Template, text: str, messages: Sequence[dict[str, Any]], tokenizer: Any, tools: Any
    ):
        self._template, self._text, self._messages = template, text, messages
        self._tokenizer, self._tools = tokenizer, tools
        self._behind: dict[tuple[Any, ...], str | None] = {}
        marked = self._render([_marked(message, i) for i, message in enumerate(messages)])
        self._ends = {}  # of contents, by message
        taken = 0
        for mark in _MARKS.finditer(marked):
            self._ends[int(mark[1])] = mark.start() - taken
            taken += len(mark[0])
        if _MARKS.sub("", marked) != text:
            self._ends = {}

    def begin(self, i: int) -> int:
        """Where message i begins: where the text leaves what asks for it."""
        place = self._ends.get(i - 1)
        if place is None:
            return self._length(i, True)
        for again in (False, True):
            asked, closed = self._suffix(i - 1, True, again), self._suffix(i - 1, False, again)
            if asked is not None and closed is not None:
                same = _common(asked, self._text[place : place + len(asked)])
                if same == len(asked) or same > len(closed):
                    return place + same
        raise self._unordered(i)

    def end(self, i: int) -> int:
        """Where message i ends, with what closes it."""
        if i + 1 == len(self._messages):
            return len(self._text)
        place = self._ends.get(i)
        if place is None:
            return self._length(i + 1, False)
        for again in (False, True):
            closed = self._suffix(i, False, again)
            if closed is not None and self._text.startswith(closed, place):
                return place + len(closed)
        raise self._unordered(i)

    def _suffix(self, i: int, asks: bool, again: bool) -> str | None:
        """What the template writes behind the content of message i where it is the last; `again`: of this
        message, else of an earlier one with the same role."""
        key = (self._messages[i].get("role"), bool(self._messages[i].get("tool_calls")), asks)
        if again or key not in self._behind:
            first = list(self._messages[: i + 1])
            rest = _MARKS.split(self._render([*first[:-1], _marked(first[-1], i)], asks))
            self._behind[key] = rest[-1] if len(rest) == 3 else None
        return self._behind[key]

    def _length(self, count: int, asks: bool) -> int:
        """Of the text of the first messages, with which the whole one begins."""
        before = self._render(self._messages[:count], asks)
        if not self._text.startswith(before):
            raise self._unordered(count)
        return len(before)

    def _render(self, messages: Sequence[dict[str, Any]], asks: bool = False) -> str:
        return self._template.render(messages, self._tokenizer, asks, self._tools)[0]

    def _unordered(self, i: int) -> Refused:
        expected = "expected each answer behind what asks for it, as one text"
        return Refused(
            f"{self._template.path}: chat template: {expected}, found another text for message {i + 1}"
        )


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _marked(message: dict[str, Any], number: int) -> dict[str, Any]:
    """With a mark behind the content, before the white space that a template may remove there."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    end = len(content.rstrip())
    return {**message, "content": content[:end] + _MARK.format(number) + content[end:]}


def add_flag(parser: Parser) -> None:
    what = "format of conversations, instead of the model's chat template"
    parser.add_argument("--template", default="", choices=list(TEMPLATES), help=what)


def named(name: str, tokenizer: Any) -> Template:
    """The template of TEMPLATES for a tokenizer. Markers that the tokenizer does not know are ordinary text.
    If it does not know the one that ends a message, its own end of a document takes that place, so that
    generation stops there."""
    end, source = TEMPLATES[name]
    if tokenizer.end is not None and len(encode(tokenizer, end)) > 1:
        own = tokenizer.decode([tokenizer.end])
        end, source = own, source.replace(end, own)
    return Template(Path(f"--template {name}"), source, end=end)


def load(directory: str | Path) -> Template:
    """Of chat_template.jinja, or the field chat_template of tokenizer_config.json or chat_template.json.
    Raises InputError where there is none."""
    folder = Path(directory)
    settings = folder / "tokenizer_config.json"
    root = read_json(settings, _KIND) if settings.exists() else {}
    tokens = special_tokens.read(folder).names
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return Template(jinja, read_text(jinja), tokens)
    other = folder / "chat_template.json"
    for path, found in ((settings, root), (other, read_json(other, _KIND) if other.exists() else {})):
        source, tool_source = found.get("chat_template"), ""
        if isinstance(source, list):  # several, by name
            by_name = {each["name"]: each["template"] for each in source}
            source, tool_source = by_name.get("default"), by_name.get("tool_use") or ""
        if isinstance(source, str):
            return Template(path, source, tokens, tool_source)
    raise InputError(
        f"{folder}: expected a chat template, chat_template.jinja or chat_template in tokenizer_config.json, "
        f"found none; chat, serve and finetune take --template {' or '.join(TEMPLATES)}"
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text: names of special tokens are these tokens, and none is added."""
    check_text(text, "conversation")
    return tokenizer.encode_with_places(text)[0]


def _generation_tag() -> type:
    """{% generation %} ... {% endgeneration %}, transformers' extension of Jinja: what is between, marked."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [begin, *body, end]

    return GenerationTag


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text, the stretches that were between marks)."""
    first, *marked = text.split(_BEGIN)
    plain, stretches = [first], []
    at = len(first)
    for part in marked:
        answer, _, rest = part.partition(_END)
        stretches.append((at, at + len(answer)))
        plain += [answer, rest]
        at += len(answer) + len(rest)
    return "".join(plain), stretches


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers: text as it is, not escaped for HTML."""
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)

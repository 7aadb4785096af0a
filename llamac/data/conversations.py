"""Rows of data for fine-tuning as conversations: the messages of OpenAI's and transformers' form, ShareGPT's
(from, value), Alpaca's (instruction, input, output), and prompts with completions.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from llamac.base.errors import InputError
from llamac.data.chat import REASONING

KNOWN = (
    '{"messages": [{"role": ..., "content": ...}, ...]}, {"conversations": [{"from": ..., "value": ...}]}, '
    '{"instruction": ..., "output": ...} or {"prompt": ..., "completion": ...}, both texts or both messages'
)
_LISTS = ("messages", "conversations", "conversation")
_ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
# Of a message: whether it is trained on.
MASKS = ("weight", "train", "loss_mask")
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING}


class NoConversation(InputError):
    """A row's value is not one of the known."""

    def __init__(self, reason: str = f"no {KNOWN}"):
        super().__init__(reason)


@dataclass(frozen=True)
class Conversation:
    """messages: with role and content as text. trained: of each, whether it is an answer that counts. tools:
    descriptions of functions, None: there are none. prompt: how many messages are a prompt, behind which all
    counts; 0: the row has no such."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[Any] | None = None
    prompt: int = 0


def of_row(
    row: Any,
    reads: Callable[[str], bool] = lambda _: False,
    ignored: Collection[str] = (),
    last_only: bool = False,
) -> Conversation | tuple[str, str]:
    """A row's conversation, or its prompt and completion as texts. reads: whether the template names a key of
    messages. ignored: keys that are dropped. last_only: only the last answer counts. Raises NoConversation,
    and InputError for a message with a key that nothing reads: it would be dropped silently."""
    row = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    prompt, completion = row.get("prompt"), row.get("completion")
    given = next((row[key] for key in _LISTS if isinstance(row.get(key), list)), None)
    if given is None and isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        given = _of_alpaca(row)
    first = 0
    if given is None and isinstance(prompt, list) and isinstance(completion, list):
        given, first = [*prompt, *completion], len(prompt)
    if given is None and isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    if not given:
        raise NoConversation
    if isinstance(row.get("system"), str) and row["system"] and _role(given[0]) != "system":
        given = [{"role": "system", "content": row["system"]}, *given]
        first += first > 0
    counts = [_is_trained(message) for message in given]
    messages = [_message(message, reads, ignored) for message in given]
    trained = [
        message["role"] == "assistant" and i >= first and counts[i] for i, message in enumerate(messages)
    ]
    if last_only:
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        trained = [counts and i == last for i, counts in enumerate(trained)]
    return Conversation(
        messages, trained, _tools(row.get("tools")), 0 if last_only or not all(counts) else first
    )


def _of_alpaca(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns are pairs in `history`; an input follows its instruction on a new line."""
    history = row.get("history") or []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise NoConversation("a history that is no list of pairs")
    asked = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    return [
        {"role": role, "content": text}
        for pair in [*history, [asked, row["output"]]]
        for role, text in zip(("user", "assistant"), pair)
    ]


def _role(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _is_trained(message: Any) -> bool:
    for name in MASKS:
        value = message.get(name) if isinstance(message, dict) else None
        if value is not None and value not in (0, 1):
            raise NoConversation(f"a {name} of a message that is neither 0 nor 1")
        if value is not None and not value:
            return False
    return True


def _message(given: Any, reads: Callable[[str], bool], ignored: Collection[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise NoConversation
    dropped = {*MASKS, *ignored}
    message = {key: value for key, value in given.items() if value is not None and key not in dropped}
    for key, other in (("role", "from"), ("content", "value")):
        if key not in message and other in message:
            message[key] = message.pop(other)
    role, content = message.get("role"), text_of(message.get("content"))
    if content is not None:
        message["content"] = content
    is_call = bool(message.get("tool_calls"))
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and is_call)):
        raise NoConversation
    unknown = [key for key in message if key not in _KEYS and not reads(key)]
    if unknown:
        raise InputError(
            f"message: expected keys that the chat template reads, found {json.dumps(unknown[0])}: "
            f"--ignore-keys {','.join(unknown)} trains without"
        )
    if role == "function_call":
        message |= {"content": "", "tool_calls": _calls(content)}
    return {**message, "role": _ROLES.get(role, role)}


def text_of(content: Any) -> str | None:
    """The text of a message's content, of all its parts. None: it has none. Raises NoConversation."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise NoConversation("content other than text")
    return "".join(found)


def _calls(content: Any) -> list[dict[str, Any]]:
    found = _parsed(content)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise NoConversation("a function_call without a name")
    return [{"type": "function", "function": call} for call in calls]


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _tools(given: Any) -> list[Any] | None:
    """A list, or JSON text of one."""
    tools = _parsed(given) if isinstance(given, str) and given.strip() else given
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise NoConversation("tools that are no list of objects")
    return tools

"""lm-eval with llamac as its model:

    llamac lm-eval --model llamac --model_args pretrained=DIR --tasks piqa

The flags are those of lm_eval, which must be installed. Importing this module registers the model class.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from llamac.base.errors import InputError
from llamac.data import chat
from llamac.eval.likelihood import BATCH_TOKENS, Scorer
from llamac.inference.model import DTYPES, Inference, Sampling


@register_model("llamac")
class LlamacLM(TemplateLM):
    """pretrained: the directory. dtype, context, batch_tokens: as Scorer has them. lm-eval also passes its
    flags batch_size, max_batch_size and device, which mean nothing here."""

    backend = "causal"

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            expected = "pretrained, dtype, context or batch_tokens"
            raise InputError(f"model_args: expected {expected}, found {', '.join(unknown)}")
        self._dtype = DTYPES.get(dtype, dtype)
        self._scorer = Scorer(
            pretrained, self._dtype, context and int(context), batch_tokens=int(batch_tokens), likeliest=True
        )
        self._templated = False  # whether texts are rendered conversations
        self._generator: Inference | None = None  # once it is wanted: it takes the weights' memory again

    @property
    def eot_token_id(self) -> int:
        return self._scorer.model.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        return self._scorer.prefix()

    @property
    def max_length(self) -> int:
        return self._scorer.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if self._templated:
            return chat.encode(self._scorer.tokenizer, string)
        if add_special_tokens is False:
            return self._scorer.model.encode(string, bos=False)
        return self._scorer.encode(string)

    @property
    def tokenizer_name(self) -> str:
        return str(self._scorer.directory).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._scorer.model.template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Without add_generation_prompt, the text ends with the last message, which the model continues."""
        self._templated = True
        text, _ = self._scorer.model.template.render(
            chat_history, self._scorer.tokenizer, add_generation_prompt
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(self, requests: Sequence, **_: Any) -> list[tuple[float, bool]]:
        found = self._scorer.of_ids([(context, continuation) for _, context, continuation in requests])
        return [(each.log, each.is_greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """As lm-eval's hf model with add_bos_token=False: its prefix token precedes the first window only."""
        sums = []
        for request in requests:
            windows = list(self._scorer.windows(self._scorer.model.encode(request.args[0], bos=False)))
            sums.append(sum(each.log for each in self._scorer.of_ids(windows)))
        return sums

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        if self._generator is None:
            self._generator = Inference(self._scorer.model.directory, self._dtype, self._scorer.context)
        return [self._answer(self._generator, *request.args) for request in requests]

    def _answer(self, model: Inference, context: str, settings: dict[str, Any]) -> str:
        """Up to the first of the texts that end it, which is not part of it."""
        ends = settings.get("until") or []
        ends = [ends] if isinstance(ends, str) else ends
        count = int(settings.get("max_gen_toks", 256))
        if count >= model.context:
            expected = f"fewer than the context of {model.context} tokens"
            raise InputError(f"max_gen_toks: expected {expected}, found {count}")
        sampled = settings.get("do_sample", False)
        temperature = float(settings.get("temperature", 1.0)) if sampled else 0.0
        ids: list[int] = []

        def made(_: int, token: int) -> bool:
            ids.append(token)
            return not any(end in model.decode(ids) for end in ends)

        prompt = self.tok_encode(context)[-(model.context - count) :]
        model.generate([prompt], count, Sampling(temperature), made=made)
        text = model.decode(ids[:-1] if ids[-1] in model.stops else ids)
        return text[: min([text.find(end) for end in ends if end in text], default=len(text))]


def main() -> None:
    import lm_eval.models  # noqa: F401  # registers lm-eval's own models, for --model hf
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

"""The flags of train_llama3.py: a part of configs/tables/flags.toml, the C program's table."""

import argparse
import math
import re
import tomllib
from dataclasses import Field, field, fields, make_dataclass, replace

from llamac.base.dtypes import TABLE
from llamac.base.errors import InputError
from llamac.base.folders import CONFIGS
from llamac.model.config import find_weights

_TYPES = {"text": str, "integer": int, "number": float, "switch": bool}
FLAGS = tomllib.loads((CONFIGS / "tables/flags.toml").read_text(encoding="utf-8"))["flag"]
_OF_PROGRAM = {f"--{row['name']}" for row in FLAGS if row.get("only") == "c"}


def _member(row: dict) -> tuple[str, type, Field]:
    """A row as a field of Options: name, type, default, with the row as metadata."""
    return row["name"].replace("-", "_"), _TYPES[row["type"]], field(default=row["default"], metadata=row)


class Options(make_dataclass("Flags", (_member(row) for row in FLAGS if row.get("only") != "c"))):  # type: ignore[misc]
    """One training run. Field `batch_size` is the flag --batch-size."""

    def micro_batches(self, devices: int = 1) -> int:
        """Micro-batches of a step: total_batch_size / (batch_size·seq_len·devices). Raises InputError."""
        micro = self.batch_size * self.seq_len * devices
        if self.total_batch_size % micro != 0:
            raise InputError(
                f"--total-batch-size: expected a multiple of batch-size·seq-len·devices = {micro} tokens, "
                f"found {self.total_batch_size}"
            )
        return max(1, self.total_batch_size // micro)

    def recompute_every(self) -> int:
        """k of --recompute block:k, 1 of block, 0 of none. Raises InputError."""
        match = re.fullmatch(r"none|block(?::([1-9][0-9]{0,8}))?", self.recompute)
        if not match:
            raise InputError(f"--recompute: expected none, block or block:K, found {self.recompute!r}")
        return 0 if self.recompute == "none" else int(match[1] or 1)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)


def _check(f: Field, value) -> None:
    """Raises InputError where the value is not one that the flag takes."""
    row, bounds = f.metadata, ""
    low, high = row.get("min", -math.inf), row.get("max", row.get("below", math.inf))
    if f.type in (int, float) and not (low <= value <= high and value != row.get("below") and value < 2**63):
        bounds = f"a number from {low} to {'below ' if 'below' in row else ''}{high}"
    if row.get("choices") and value not in row["choices"]:
        bounds = " or ".join(row["choices"])
    if bounds:
        raise InputError(f"--{row['name']}: expected {bounds}, found {value}")


def parse(argv: list[str], description: str = "Train Llama 3.") -> Options:
    """Options from the command line. Raises InputError; --help exits."""
    parser = _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in fields(Options):
        row, how = f.metadata, {"dest": f.name}  # type: ignore[var-annotated]
        default = "" if f.default == "" or f.type is bool else f" [{f.default}]"
        how["help"] = row["help"].replace("%", "%%") + default
        if f.type is bool:
            how["action"] = "store_true"
        else:
            letter = {int: "N", float: "X"}.get(f.type, "")
            how |= {"type": f.type, "metavar": row.get("value") or "|".join(row.get("choices", ())) or letter}
        if row["group"] not in groups:
            groups[row["group"]] = parser.add_argument_group(row["group"])
        groups[row["group"]].add_argument("--" + row["name"], **how)
    given, others = parser.parse_known_args(argv)
    if others:
        flag = others[0].split("=")[0]
        program = f"{flag}: only ./train_llama3 and llamac.Trainer have it"
        raise InputError(program if flag in _OF_PROGRAM else f"{others[0]}: no such flag; --help lists them")
    options = Options(**vars(given))
    for f in fields(Options):
        _check(f, getattr(options, f.name))
    options.recompute_every()
    weights, gradients = TABLE[options.dtype], TABLE[options.grad_dtype]
    if gradients.mantissa_bits < weights.mantissa_bits:
        raise InputError(f"--grad-dtype {gradients.name}: expected f32, which --dtype {weights.name} needs")
    fp16 = options.dtype == "fp16"
    if fp16 and options.master_weights == "off":
        raise InputError("--master-weights off: expected on, which --dtype fp16 needs")
    if fp16 and options.matmul_dtype == "fp8":
        raise InputError("--matmul-dtype fp8: expected --dtype bf16 or f32, found fp16")
    if options.loss_scale and (not fp16 or math.frexp(options.loss_scale)[0] != 0.5):
        found = "another number" if fp16 else f"--dtype {weights.name}"
        expected = "expected a power of two with --dtype fp16, or 0"
        raise InputError(f"--loss-scale {options.loss_scale:g}: {expected}, found {found}")
    if options.init == "auto":
        return replace(options, init="load" if find_weights(options.model) else "random")
    return options

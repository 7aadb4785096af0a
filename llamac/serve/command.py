"""`llamac serve DIR` serves OpenAI's chat and text completions, and a chat page, over HTTP."""

from pathlib import Path

from llamac.base.arguments import Parser
from llamac.base.errors import InputError
from llamac.data import chat
from llamac.inference.model import Inference, TextModel, add_flags
from llamac.serve.engine import Engine

CONTEXT = 8192  # tokens, without --context


def main() -> None:
    parser = Parser("serve", __doc__)
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer; or a run's output folder")
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, help="port; 0: any free one (8000)")
    add("--name", help="the model's name in answers (the directory's)")
    add("--batch", type=int, default=8, metavar="N", help="answers at a time (8)")
    add("--context", type=int, metavar="N", help=f"tokens of a prompt and its answer (up to {CONTEXT})")
    chat.add_flag(parser)
    add_flags(parser)
    args = parser.parse_args()
    if not 0 <= args.port < 65536:
        raise InputError(f"--port: expected a number from 0 to 65535, found {args.port}")
    try:
        from llamac.serve.api import Server, application
    except ImportError as error:
        expected = "expected the packages fastapi and uvicorn"
        raise InputError(f"{expected}, found no {error.name}: pip install fastapi uvicorn") from None
    longest = TextModel(args.directory).config.max_position_embeddings
    context = args.context or min(longest, CONTEXT)
    model = Inference(args.directory, args.dtype, context, args.batch, 0, args.kernel, args.template)
    name = args.name or Path(args.directory).resolve().name
    Server(application(Engine(model, args.batch), name), args.host, args.port, name).run()

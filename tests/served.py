"""A small server with the OpenAI completions API, over our own decoding."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from minispec.generate import decode

DEFAULTS = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 0}


class CorrectServer:
    """The behaviour of a server, in parts that a wrong server overrides."""

    name, paths = "toy", ("/v1/completions",)
    runs: dict = {}  # of all servers; repeated requests are not decoded again

    def __init__(self, model, tokenizer, method: str = "autoregressive", **options):
        self.model, self.tokenizer, self.method, self.options = model, tokenizer, method, options
        self.drafted = self.accepted = 0
        self.keys = []  # the Authorization header of every request
        self.lock = threading.RLock()  # mutants patch the process: one request at a time

    def run(self, request: dict, seed: int):
        """Return one run, or None if the request has a logit_bias."""
        if request.get("logit_bias"):
            return None
        prompt, greedy = self.prompt(request["prompt"]), request["temperature"] == 0
        options = {
            "max_new_tokens": request["max_tokens"], "temperature": request["temperature"],
            "top_k": max(0, request["top_k"]), "top_p": request["top_p"],
            "seed": 0 if greedy else seed,
        }  # fmt: skip
        key = self.model, self.method, *self.options.values(), repr((prompt, options))
        with self.lock:
            run = self.runs.get(key) or decode(
                self.model, self.tokenizer, prompt, self.method, **options, **self.options
            )
            self.runs[key] = run
        self.drafted += run.stats["drafted"]
        self.accepted += run.stats["accepted"]
        return run

    def prompt(self, ids):
        return ids

    def choice(self, request: dict, seed: int) -> dict:
        run = self.run(request, seed)
        if run is None:  # the bias makes an end token the best
            return {"text": "", "token_ids": [], "finish_reason": "stop"}
        ended = run.finish_reason in ("eos", "stop")
        found = {
            "text": run.text, "token_ids": run.tokens,
            "finish_reason": "stop" if ended else "length",
        }  # fmt: skip
        if request.get("logprobs") is not None:
            found["logprobs"] = {"token_logprobs": self.logprobs(run)}
        return found

    def logprobs(self, run) -> list[float]:
        before = [*run.prompt, *run.tokens]
        rows = self.model.logits(self.model(before)[0]).log_softmax(-1)
        at = len(run.prompt) - 1
        return [float(rows[at + i, token]) for i, token in enumerate(run.tokens)]

    def models(self) -> tuple[int, dict]:
        """Return the HTTP status and the list of models."""
        if self.name is None:
            return 401, {}
        names = self.name if isinstance(self.name, list) else [self.name]
        return 200, {"data": [{"id": name} for name in names]}

    def answer(self, request: dict) -> tuple[int, dict | bytes | str | Iterator[bytes]]:
        """Return the HTTP status and a JSON object, raw bytes, the target of a redirect, or parts
        to be sent one by one."""
        prompt = self.prompt(request["prompt"])
        length = len(prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt))
        choice = self.choice(request, request["seed"])
        return 200, {"choices": [choice], "usage": {"prompt_tokens": length}}

    def metrics(self) -> str:
        return (
            "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(self.drafted)}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(self.accepted)}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 9.0\n'
        )


class TextPrompts(CorrectServer):
    """Accept text only, no token ids."""

    def answer(self, request):
        if not isinstance(request["prompt"], str):
            return 400, {"error": {"message": "prompt must be a string"}}
        return super().answer(request)


def handler(backend: CorrectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet, which avoids a delay

        def do_GET(self):
            backend.keys.append(self.headers["Authorization"])
            if self.path == "/metrics":
                self.send(200, backend.metrics().encode())
            elif self.path.endswith("/v1/models"):  # a proxy is sent the whole address
                self.send(*backend.models())
            else:
                self.send(404, {})

        def do_POST(self):
            backend.keys.append(self.headers["Authorization"])
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path not in backend.paths:
                return self.send(404, {"error": {"message": "no such path"}})
            status, found = backend.answer(DEFAULTS | request | {"path": self.path})
            self.send(status, found)

        def send(self, status: int, found: dict | bytes | str | Iterator[bytes]):
            data = json.dumps(found).encode() if isinstance(found, dict) else found
            self.send_response(status)
            if isinstance(data, str):
                self.send_header("Location", data)
                data = b""
            parts = [data] if isinstance(data, bytes) else data
            length = len(data) if isinstance(data, bytes) else 10**6
            self.send_header("Content-Length", str(length))
            self.end_headers()
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()

        def log_message(self, *_):
            pass

    return Handler


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_):
        """Print no traceback for closed connections and deliberate errors."""


@contextmanager
def serving(backend: CorrectServer):
    """Run a server and yield its address."""
    server = backend.server = QuietServer(("127.0.0.1", 0), handler(backend))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A conversation of two processes, each of which uses objects that the other one holds.

Data travel by value: numbers, texts, containers, tensors, and what `by_value` allows. All else
stays where it is; the other end gets a `Remote`, which asks for every call, attribute and item.
What arrives at the grader is rebuilt from plain data there: no class, method or operator of a
submission ever runs in it.
"""

import builtins
import importlib
import io
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from weakref import WeakValueDictionary

import torch

VERBS = {
    "get": getattr, "set": setattr, "call": lambda f, *rest, **named: f(*rest, **named),
    "len": len, "iter": iter, "next": next, "item": lambda x, i: x[i],
    "import": importlib.import_module, "copy": lambda x: x,
}  # fmt: skip
LARGEST = 2**29  # bytes of a message


class Ended(BaseException):
    """There is no other end any more."""


class Remote:
    """An object that the other end holds."""

    def __init__(self, link: "Link", key: int):
        vars(self).update(_link=link, _key=key, _times=0)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.ask("set", self, name, value)

    def __call__(self, *arguments, **options):
        return self._link.ask("call", self, *arguments, **options)

    def __len__(self) -> int:
        return self._link.ask("len", self)

    def __bool__(self) -> bool:
        return True

    def __iter__(self):
        found = self._link.ask("iter", self)
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self):
        return self._link.ask("next", self)

    def __getitem__(self, index: object):
        return self._link.ask("item", self, index)

    def __del__(self):
        self._link.released.append((self._key, self._times))


class Link:
    """One end. What a submission may get, send and do is decided by the grader's, a subclass."""

    def __init__(self, connection: Connection):
        self.connection = connection
        # by key: what the other end has of this one's, and how many times it was sent
        self.held: dict[int, tuple[object, int]] = {}
        self.remotes: WeakValueDictionary[int, Remote] = WeakValueDictionary()
        self.released: list[tuple[int, int]] = []  # of the other's, what this end has dropped

    def by_value(self, x: object) -> bool:
        """Whether the other end gets a copy."""
        raise NotImplementedError

    def plain(self, x: object):
        """How to rebuild what is not sent as it is, as for `pickle.Pickler.reducer_override`."""
        return NotImplemented

    def find_class(self, module: str, name: str) -> type | Callable:
        """What a copy that arrives may be made of."""
        return getattr(importlib.import_module(module), name)

    def permits(self, verb: str, x: object, *more) -> bool:
        """Whether the other end may do this with an object of this one."""
        return True

    def ask(self, verb: str, *arguments, **options):
        """What the other end answers, which may ask back before. Raises what is raised there."""
        self.send("ask", verb, arguments, options)
        while True:
            kind, *rest = self.receive()
            if kind == "value":
                return rest[0]
            if kind == "error":
                raise exception(*rest)
            self.answer(*rest)

    def answer(self, verb: str, arguments: tuple, options: dict) -> None:
        try:
            if not self.permits(verb, *arguments):
                raise PermissionError(f"not for a submission: {verb} {arguments[1:]}")
            reply = "value", VERBS[verb](*arguments, **options)
        except (KeyboardInterrupt, Ended):
            raise
        except BaseException as error:  # of SystemExit and pytest.skip, too
            plain = all(type(x) in (int, str) for x in error.args)
            reply = "error", type(error).__name__, error.args if plain else (str(error),)
        self.send(*reply)

    def send(self, *message) -> None:
        file, released = io.BytesIO(), self.released[:]
        del self.released[: len(released)]
        Pickler(file, self).dump((released, message))
        self.connection.send_bytes(file.getvalue())

    def receive(self) -> tuple:
        file = io.BytesIO(self.connection.recv_bytes(LARGEST))
        released, message = Unpickler(file, self).load()
        for key, times in released:
            x, sent = self.held.pop(key)
            if sent > times:  # it is on its way once more
                self.held[key] = x, sent - times
        return message


def exception(name: str, arguments: tuple) -> Exception:
    """An exception of the other end: one of Python's own, or one of the same name."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = type(name, (Exception,), {})
    try:
        return kind(*arguments)
    except TypeError:  # some want arguments of certain types
        return type(name, (Exception,), {})(*arguments)


class Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, link: Link):
        super().__init__(file, protocol=5)
        self.link = link

    def persistent_id(self, x: object) -> tuple | None:
        if isinstance(x, Remote):
            return "yours", x._key
        if isinstance(x, torch.dtype):
            return "dtype", str(x).removeprefix("torch.")
        if isinstance(x, torch.Tensor):
            parameter, x = isinstance(x, torch.nn.Parameter), x.as_subclass(torch.Tensor)
            data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(x.dtype).removeprefix("torch.")
            return "tensor", dtype, tuple(x.shape), data, x.requires_grad, parameter
        if self.link.by_value(x):
            return None
        self.link.held[id(x)] = x, self.link.held.get(id(x), (x, 0))[1] + 1
        return "mine", id(x)

    def reducer_override(self, x: object):
        return self.link.plain(x)


class Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, link: Link):
        super().__init__(file)
        self.find_class, self.link = link.find_class, link

    def persistent_load(self, what: tuple):
        kind, key, *tensor = what
        if kind == "mine":
            remote = self.link.remotes.setdefault(key, Remote(self.link, key))
            vars(remote)["_times"] += 1
            return remote
        if kind == "yours":
            return self.link.held[key][0]
        dtype = getattr(torch, key)
        if kind == "dtype":
            return dtype
        shape, data, requires_grad, parameter = tensor
        x = torch.empty(0, dtype=dtype)
        x = (torch.frombuffer(bytearray(data), dtype=dtype) if data else x).reshape(shape)
        if parameter:
            return torch.nn.Parameter(x, requires_grad)
        return x.requires_grad_(requires_grad)

"""A pickle read as data: a stack machine that knows few instructions and calls nothing.

A pickle is a program for a stack machine, and `pickle.load` lets it call whatever can be imported. The machine here
calls nothing at all. It knows the instructions that plain data needs; names are tokens to it, and what those stand for
that a kind of file may hold is written out in a subclass, with every size checked. Any other instruction or name ends
the reading, and is named.

So that a small file cannot fill the memory: instructions are counted, strings are encoded only up to the size of the
file, and memory cells are a dict (where `pickle` has a list, which one instruction can make gigabytes long). A key is
a string or a small number, since hashing nested tuples can take forever.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from typing import Any

MOST_INSTRUCTIONS = 1_000_000
"""CIFAR-100's training file has about 250,000."""

_CONSTANTS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINSTRING", "SHORT_BINSTRING"}  # Python 2's, then Python 3's
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
)


class Refused(Exception):
    """Something that plain data does not need."""


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """An admitted name. Not callable; nothing can be set on it."""

    name: str


_MARK = object()
_FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}


class Machine:
    """Runs one pickle. A subclass says which names it admits, and what calling one and giving it a state makes."""

    admitted: frozenset[tuple[str, str]] = frozenset()

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.bytes_left = size  # to encode strings into

    def run(self, content: bytes, start: int = 0) -> tuple[Any, int]:
        """What the pickle that begins there leaves, and where it ends."""
        stream = io.BytesIO(content)
        stream.seek(start)
        for count, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
            if count == MOST_INSTRUCTIONS:
                raise Refused(f"more than {MOST_INSTRUCTIONS:,} instructions")
            if opcode.name == "STOP":
                (value,) = self.stack
                assert position is not None
                return value, position + 1
            self.step(opcode.name, argument)
        raise ValueError("no STOP")  # pickletools says so itself

    def step(self, opcode: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _CONSTANTS:
                stack.append(argument)
            case _ if opcode in _FIXED:
                stack.append(_FIXED[opcode])
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if opcode == "EMPTY_DICT" else [])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([self.pop() for _ in range(int(opcode[-1]))])))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "APPEND":
                item = self.pop()
                self.top(list).append(item)
            case "APPENDS":
                items = self.pop_to_mark()
                self.top(list).extend(items)
            case "SETITEM":
                item, key = self.pop(), self.pop()
                self.set_items([key, item])
            case "SETITEMS":
                self.set_items(self.pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top(object)
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top(object)
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self.find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                stack.append(self.find(module, name))
            case "REDUCE":
                arguments, token = self.pop(), self.pop()
                if not isinstance(token, Token):
                    raise Refused(f"a call of {kind_of(token)}")
                stack.append(self.reduce(token, arguments))
            case "BUILD":
                state = self.pop()
                self.build(self.top(object), state)
            case "BINPERSID":
                stack.append(self.persistent(self.pop()))
            case _:
                raise Refused(f"the instruction {opcode}")

    def pop(self) -> Any:
        """The value on top of the stack."""
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("nothing on the stack")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The same, which stays there and has to be of this kind."""
        if not self.stack or self.stack[-1] is _MARK or not isinstance(self.stack[-1], kind):
            raise ValueError(f"no {kind.__name__} on the stack")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        """All values above the last mark, which goes too."""
        place = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK), None)
        if place is None:
            raise ValueError("no mark on the stack")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def set_items(self, items: list[Any]) -> None:
        """Keys and values, one after the other, into the dict on top."""
        mapping = self.top(dict)
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, item in zip(items[::2], items[1::2], strict=True):
            mapping[self.key(key)] = item

    def key(self, key: Any) -> Any:
        """A key as the dict has it."""
        if not isinstance(key, str | bytes):
            raise Refused(f"a key that is {kind_of(key)}")
        return key if isinstance(key, str) else key.decode("latin-1")

    def find(self, module: Any, name: Any) -> Token:
        """The token of a name."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no string")
        if (module, name) not in self.admitted:
            raise Refused(f"the name {f'{module}.{name}'[:100]!r}")
        return Token(name)

    def reduce(self, token: Token, arguments: Any) -> Any:
        """What calling an admitted name stands for."""
        raise Refused(f"{token.name} of {shown(arguments)}")

    def build(self, target: Any, state: Any) -> None:
        """Give something its state."""
        raise Refused(f"a state of {kind_of(target)} that is {shown(state)}")

    def persistent(self, identity: Any) -> Any:
        """What lies outside of the pickle."""
        raise Refused("the instruction BINPERSID")

    def encode(self, text: str) -> bytes:
        """Bytes that were pickled as text."""
        self.bytes_left -= len(text)
        if self.bytes_left < 0:
            raise Refused("strings that are encoded again and again")
        return text.encode("latin-1")


def in_brief(error: Exception) -> str:
    """What pickletools and an empty stack raise, in a few words."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}"


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    return f"the name {value.name}" if isinstance(value, Token) else f"of type {type(value).__name__.strip('_')}"


def shown(value: Any) -> str:
    """Its items in brief: a hostile value may be huge, or hold itself."""
    if not isinstance(value, tuple):
        return kind_of(value)
    return f"({', '.join(map(_item_shown, value[:5]))}{', …' if len(value) > 5 else ''})"


def _item_shown(item: Any) -> str:
    if isinstance(item, str | bytes):
        return repr(item[:16])
    if isinstance(item, int) and abs(item) >= 1 << 64:
        return "a huge number"  # of many digits Python writes none
    return repr(item)[:24] if isinstance(item, int) or item is None else kind_of(item)

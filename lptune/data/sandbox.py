"""A jinja environment for chat templates of other people: no access to Python, and limited work.

Jinja's own sandbox keeps a template away from Python (no attribute that begins with an underscore, no
mutation, no import). It does not limit work: three nested loops over `range(100000)`, a text doubled forty
times, one `"{:>999999999}".format("")`. The code here counts work and ends a rendering that exceeds MAX_WORK.
A count is the same on every machine and in every thread. An alarm clock is not, and could not interrupt a
single call inside the interpreter.

Work is counted in characters: those that an operation reads and those that it makes. An item of a list counts
as ITEM, a pass of a loop or a call as STEP, roughly in proportion to their time. Where a result can be longer
than its operands, work is counted *before* it is done. So every operation of a template must pass through the
counter. A parsed template is rewritten before it is compiled, with nodes that jinja offers to extensions:

  loops, macros   a count, written as a filter, stands at the head of their bodies
  `~`, compare, [a:b]          a filter around their operands, which jinja compiles to plain Python
  [key], {key: …} a filter around keys, whose hash reads all of a tuple
  {{ }}           the environment's `finalize`
  + - * / // % **              the sandbox's interception of operators
  calls           its interception of calls: methods of values are checked, most types have none
  filters, tests  wrapped; a lazy result is counted item by item
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from collections.abc import Set as AnySet
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_WORK = 2**28
"""Limit per rendering. The longest test conversation, of 1,000 turns, takes a hundredth of it."""
MAX_VALUE = 64 * 1024 * 1024
"""Largest number of characters that one operation may make."""
STEP, ITEM = 256, 64
_MAX_INTEGER_BITS = 4096

_GROWING = {
    "*", "batch", "center", "expandtabs", "indent", "join", "ljust", "rjust", "slice", "tojson", "translate",
    "urlize", "wordwrap", "xmlattr", "zfill",
}  # fmt: skip
"""Operations whose result can be as large as the product of the sizes of their operands."""
_COUNTED = {
    "*", "batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill",
}  # fmt: skip
"""Operations with a number that is a count: of copies, columns, digits. Elsewhere a number is a value, such
as the telephone number in a tool call.
"""
_FORMATTING = {"%", "format", "format_map"}
_QUADRATIC = {"pprint", "round", "striptags", "sum", "urlize", "wordwrap"}
"""Operations that may take the square of the sizes of their operands in time."""
_SORTING = {"dictsort", "groupby", "max", "min", "sort", "unique"}
_SHALLOW = {
    "d", "default", "first", "get", "items", "keys", "last", "length", "map", "reject", "rejectattr",
    "select", "selectattr", "values",
}  # fmt: skip
"""Operations that do not read inside their first operand, or that pass its items on one by one."""
_COMPARING = {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan",
              ">", "ge", ">="}  # fmt: skip
_READING = {"lower", "upper", "filter", "test"}
"""Tests that read all of a text, or hash their operand."""
_STEP, _WEIGH, _GLANCE = "step!", "weigh!", "glance!"
"""Filters that `_insert_counts` writes. The names of filters in a template have no `!`."""


class TooMuchWorkError(SecurityError):
    """The rendering has exceeded MAX_WORK."""


class Work:
    """Counts the work that a rendering may still do."""

    def __init__(self) -> None:
        self.left = MAX_WORK

    def spend(self, amount: int) -> bool:
        """Counts `amount`; raises TooMuchWorkError at the limit. Returns True, for use in a condition."""
        self.left -= amount
        if self.left < 0:
            raise TooMuchWorkError(f"more than {MAX_WORK:,} characters, items and steps of work")
        return True

    def step(self, amount: Any) -> bool:
        """`spend` as a filter. A template can call it (`map("step!")`), so it never gives work back."""
        if type(amount) is not int or amount < 0:
            raise SecurityError("no count")
        return self.spend(amount)

    def weigh(self, value: Any) -> Any:
        """Spends the full weight of `value`; returns `value`.

        Full weight: a list that holds another list twice counts it twice, as printing and comparing do. Forty
        such lists in each other are 2^40 items.
        """
        if isinstance(value, str):  # nearly always
            self.left -= len(value)
            if self.left >= 0:
                return value
        if value is None or isinstance(value, int):
            return self.glance(value)
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.spend(len(item))
            elif isinstance(item, (dict, Mapping)):  # dict before Mapping: an ABC takes ten times as long
                self.spend(ITEM * len(item))
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, (list, tuple, AnySet, KeysView, ValuesView)):
                self.spend(ITEM * len(item))
                waiting += item
            elif isinstance(item, Namespace):
                raise SecurityError("a namespace is no text")  # and its size is not known
            else:
                self.glance(item)
        return value

    def glance(self, value: Any) -> Any:
        """Spends the outer weight of `value`; returns it (an iterator then counts its items)."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, int):
            self.spend(ITEM + value.bit_length())
        elif isinstance(value, (list, dict, Sequence, Mapping, AnySet)):
            self.spend(ITEM * len(value))
        elif isinstance(value, Iterator):
            return map(self.weigh, value)
        else:
            self.spend(ITEM)
        return value

    def before(self, name: str, operands: Sequence[Any]) -> None:
        """Spends the work of an operation on `operands`, before it is done."""
        self.spend(STEP)
        if name in _SHALLOW:
            for operand in operands[1:]:  # an attribute or a key is hashed
                self.weigh(operand)
            return
        first = 0 if name == "*" else 1
        sizes = [self._size(each, name in _COUNTED and i >= first) for i, each in enumerate(operands)]
        makes = 0
        if name == "replace" and len(operands) > 2:
            text, old, new = (str(each) for each in operands[:3])
            makes = text.count(old) * len(new)
        elif name in _FORMATTING and operands:
            makes = _formatted(name, str(operands[0]), sum(sizes[1:]))
        elif name in _GROWING:
            makes = math.prod(max(1, size) for size in sizes)
        adds_numbers = name == "sum" and not any(isinstance(start, (list, tuple)) for start in operands[1:])
        if name in _QUADRATIC and not adds_numbers:
            makes = max(makes, sum(sizes) ** 2)
        if name in _SORTING:
            self.spend(8 * sum(sizes))
        if makes > MAX_VALUE:
            raise SecurityError(f"{name!r} would make too large a value")
        self.spend(makes)

    def _size(self, operand: Any, is_count: bool) -> int:
        """The weight of a value: of a count, the number itself; of another number, its binary digits."""
        start = self.left
        self.weigh(operand)
        if isinstance(operand, int):
            return abs(operand) if is_count else max(1, operand.bit_length())
        return start - self.left


def _formatted(name: str, pattern: str, weight: int) -> int:
    """Number of characters that `pattern` can make of values with this weight."""
    if name == "%":
        takes_width = re.search(r"%[^a-zA-Z%]*\*", pattern) is not None
    else:  # parsed, since the name in {0[}]:{1}} holds a brace
        takes_width = any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(pattern))
    if takes_width:
        raise SecurityError(f"{pattern!r:.40} takes a width from a value")
    widths = [int(digits) for digits in re.findall(r"\d+", pattern)]
    return (1 + len(pattern)) * (1 + weight + max(widths, default=0))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a count of work. Call `start` before each rendering; `work` holds what is left of
    the limit.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        # Constant folding would do the work at compile time, where it is not counted.
        super().__init__(optimized=False, finalize=_finalize, **options)
        del self.globals["lipsum"]  # random text of any length
        self.start()

    def start(self) -> None:
        """Starts the count for a new rendering."""
        self.work = Work()
        self.filters |= {_STEP: self.work.step, _WEIGH: self.work.weigh, _GLANCE: self.work.glance}

    def meter(self) -> None:
        """Wraps the filters and tests of the environment, so that they are counted."""
        own = (_STEP, _WEIGH, _GLANCE)
        # Jinja's filter `format` is Python's %.
        self.filters |= {
            name: self._metered("%" if name == "format" else name, function)
            for name, function in self.filters.items()
            if name not in own
        }
        self.tests |= {name: self._metered(name, self.tests[name]) for name in _COMPARING | _READING}

    def counted(self, source: str) -> nodes.Template:
        """`source`, parsed, with counters where jinja offers no interception; `from_string` compiles it."""
        tree = self.parse(source)
        _insert_counts(tree)
        return tree

    def _metered(self, name: str, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            # A filter may take the context, which precedes the operands.
            first = int(isinstance(args[0], (Context, EvalContext, Sandbox)))
            self.work.before(name, [*args[first:], *kwargs.values()])
            return self.work.glance(function(*args, **kwargs))

        return metered

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Counts a call; for a method of a value, also the work that it will do."""
        self.work.spend(STEP + ITEM * (len(args) + len(kwargs)))
        bound = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner = getattr(bound, "__self__", None)
        # int.to_bytes makes any amount; dict.fromkeys and str.maketrans (without an owner) read any amount.
        if isinstance(owner, (int, float, bytes, type)) or called is str.maketrans:
            raise SecurityError(f"{bound.__name__!r} is a method that templates do not need")
        if isinstance(owner, (str, list, tuple, dict, range, AnySet, ValuesView)):

            def metered(*operands: Any, **named: Any) -> Any:
                self.work.before(bound.__name__, [owner, *operands, *named.values()])
                return self.work.glance(called(*operands, **named))

            if not self.is_safe_callable(called):
                raise SecurityError(f"{bound.__name__!r} is not safely callable")
            # Jinja adds the variables of the enclosing loop to `kwargs`, and removes them before it calls
            # `metered`.
            return super().call(context, metered, *args, **kwargs)
        if called is dict or isinstance(owner, LoopContext):  # whose `changed` compares
            for argument in args:
                self.work.weigh(argument)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Counts an operator. Limits the size of integers, so that arithmetic stays fast."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # nearly always
            self.work.spend(len(left) + len(right))
            return left + right
        bits = [side.bit_length() for side in (left, right) if isinstance(side, int)]
        if operator == "**" and len(bits) == 2:
            bits.append(bits[0] * abs(right))
        if max(bits, default=0) > _MAX_INTEGER_BITS:
            raise SecurityError(f"{operator!r} would make too large a value")
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            self.work.spend(STEP)
        elif operator == "+":
            self.work.glance(left)
            self.work.glance(right)
        else:
            self.work.before(operator, [left, right])
        return self.work.glance(self.binop_table[operator](left, right))


@pass_context  # or constants would be printed when the template is compiled
def _finalize(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return environment.work.weigh(value)


def _insert_counts(tree: nodes.Template) -> None:
    """Inserts counters into `tree` for the operations that jinja compiles to plain Python."""
    repeated: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
    for found in list(tree.find_all(repeated)):
        written = sum(len(text.data) for text in found.find_all(nodes.TemplateData))
        found.body.insert(0, nodes.ExprStmt(_step(STEP + written), lineno=found.lineno))
    for loop in list(tree.find_all(nodes.For)):
        if loop.test is not None:
            loop.test = nodes.And(_step(STEP), loop.test)
    for compare in list(tree.find_all(nodes.Compare)):
        compare.expr = _counted(_WEIGH, compare.expr)
        for operand in compare.ops:
            operand.expr = _counted(_WEIGH, operand.expr)
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [_counted(_WEIGH, part) for part in concat.nodes]
    for item in list(tree.find_all(nodes.Getitem)):
        if isinstance(item.arg, nodes.Slice):
            item.node = _counted(_GLANCE, item.node)
        else:
            item.arg = _counted(_WEIGH, item.arg)
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = _counted(_WEIGH, pair.key)


def _step(amount: int) -> nodes.Expr:
    return nodes.Filter(nodes.Const(amount), _STEP, [], [], None, None)


def _counted(how: str, expression: nodes.Expr) -> nodes.Expr:
    if isinstance(expression, nodes.Const):
        return expression
    return nodes.Filter(expression, how, [], [], None, None, lineno=expression.lineno)

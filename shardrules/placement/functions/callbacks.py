"""Errors that callbacks of compiled programs raise, `equinox.error_if` among them, on any number of devices.

A callback that raises ends the program on its own device, and the other devices wait for that device for ever. So here
callbacks keep what they raise, and return NaNs, with which the program ends. Then the error is raised.
"""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import attrs
import equinox as eqx
import jax
import numpy as np
from equinox._jit import filter_jit as equinox_filter_jit  # equinox.filter_jit may be ours, put there by a program
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardrules.core.source import equation_stack, user_frames
from shardrules.placement.functions.calls import PartialCall, Result, flatten_call

T = TypeVar("T")

_PRIMITIVE = "pure_callback"
"""The name of `jax.pure_callback` in traced programs. Other callbacks have side effects, and run as they are."""

_ADVICE = "\n\n\n-----"
"""The advice after the message of `equinox.error_if` in its exception: to use `equinox.filter_jit`."""


@final
@attrs.define(eq=False)
class CallbackErrors:
    """The errors of callbacks, with the lines of code that called them, until they are raised outside the program."""

    _errors: list[tuple[Exception, str]] = attrs.field(factory=list)
    _lock: Any = attrs.field(factory=threading.RLock)
    """Callbacks run in threads of XLA, which do not tell for whom: one thread at a time runs what keeps errors here."""

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, error: Exception, line: str) -> None:
        """Keeps an error."""
        self._errors.append((error, line))

    def run(self, run: Callable[[], tuple[T, bool]]) -> T:
        """Returns the first result of `run`, and raises errors if the second, whether there are callbacks, is true."""
        __tracebackhide__ = True
        if _errors_of_thread() is self:  # the call around the callback has the lock, and raises what is raised here
            return run()[0]
        with self._lock:
            self._errors.clear()  # of a program that failed otherwise
            result, has_callbacks = run()
            if has_callbacks:
                jax.block_until_ready(eqx.filter(result, eqx.is_array))
                self._raise_first()
            return result

    def _raise_first(self) -> None:
        """Raises the first error, if there is one, as `equinox.filter_jit` and `jax.jit` do on one device."""
        if not self._errors:
            return
        error, line = self._errors[0]
        self._errors.clear()
        called = f"\n(called at {line})" if line else ""
        # Equinox has no public name for what `error_if` raises in a callback; its own `filter_jit` goes by this one.
        if type(error).__name__ == "_EquinoxRuntimeError":
            _raise_from_equinox(error)
            raise eqx.EquinoxRuntimeError(f"{str(error).partition(_ADVICE)[0]}{called}") from None
        raise jax.errors.JaxRuntimeError(f"a callback raised {type(error).__name__}: {error}{called}") from error

    def guard(self, program: ClosedJaxpr) -> ClosedJaxpr:
        """Returns a traced program with its callbacks guarded, so that they keep what they raise here."""
        return self._guard_inside(program, "") if _has_callback(program) else program

    def _guard_inside(self, value: Any, line: str) -> Any:
        """Guards the callbacks of a program, or of the programs in a parameter of an equation of that line of code."""
        match value:
            case ClosedJaxpr() if value.jaxpr is not value:  # from JAX 0.12 on the two are one class
                return ClosedJaxpr(self._guard_inside(value.jaxpr, line), value.consts)
            case Jaxpr():
                return value.replace(eqns=[self._guard_equation(equation, line) for equation in value.eqns])
            case tuple() if any(isinstance(item, ClosedJaxpr | Jaxpr) for item in value):
                return tuple(self._guard_inside(item, line) for item in value)
            case _:
                return value

    def _guard_equation(self, equation: Any, outer_line: str) -> Any:
        frames = user_frames(equation_stack(equation))  # none where Equinox's own jit is around the callback
        line = str(frames[0]) if frames else outer_line
        params = {name: self._guard_inside(value, line) for name, value in equation.params.items()}
        if equation.primitive.name == _PRIMITIVE:
            kinds = tuple((tuple(aval.shape), aval.dtype) for aval in params["result_avals"])
            params["callback"] = _Guarded(params["callback"], self, kinds, line)
        return equation.replace(params=params)


def _has_callback(value: Any) -> bool:
    """Returns whether a program, or a parameter of an equation, has a callback inside."""
    match value:
        case ClosedJaxpr() if value.jaxpr is not value:
            return _has_callback(value.jaxpr)
        case Jaxpr():
            return any(
                equation.primitive.name == _PRIMITIVE or any(map(_has_callback, equation.params.values()))
                for equation in value.eqns
            )
        case _:
            return isinstance(value, tuple | list) and any(map(_has_callback, value))


_THREAD = threading.local()
"""Its `errors` are those of the callback that the current thread runs."""


def _raise_from_equinox(error: Exception) -> None:
    """Raises an error of `equinox.error_if` in a program of Equinox's own, which adds the stack and how to debug it."""

    def fail() -> Any:
        raise error

    def run() -> None:
        with jax.default_device(device):
            equinox_filter_jit(lambda: jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.int32)))()

    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to start no CPU backend
        return
    # In a thread no mesh is in force, on all devices of which the program would run.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def _errors_of_thread() -> CallbackErrors | None:
    return getattr(_THREAD, "errors", None)


@final
@attrs.frozen
class _Guarded:
    """A callback that never raises, and is not called any more once a callback of the program has raised."""

    callback: Callable[..., Sequence[Any]]
    errors: CallbackErrors
    kinds: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape and dtype of each result."""
    line: str

    def __call__(self, *args: Any) -> Sequence[Any]:
        if not self.errors:
            outer, _THREAD.errors = _errors_of_thread(), self.errors
            try:
                return self.callback(*args)
            except Exception as error:  # noqa: BLE001  (raised again by `run`, when the program has ended)
                self.errors.add(error, self.line)
            finally:
                _THREAD.errors = outer
        return [_nans(*kind) for kind in self.kinds]


_ERRORS: weakref.WeakKeyDictionary[Any, CallbackErrors] = weakref.WeakKeyDictionary()
"""For functions that Equinox compiles: all wrappers of a function share what is compiled, and with it this."""

_ERRORS_LOCK = threading.Lock()


def errors_of(fn: Any) -> CallbackErrors:
    """Returns where callbacks of a function that Equinox compiles keep their errors: the same for the same program."""
    while isinstance(fn, functools.partial | PartialCall) or hasattr(fn, "__func__"):
        fn = getattr(fn, "__func__", None) or fn.func  # Equinox's bound methods have the first, too
    with _ERRORS_LOCK:
        return _ERRORS.setdefault(fn if isinstance(fn, types.FunctionType) else type(fn), CallbackErrors())


def with_guard(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to trace in the place of `fn`, with its arrays, name and signature.

    It returns the result, and whether there are callbacks.
    """
    partial = jax.tree_util.Partial(_run_guarded, fn)
    partial.__wrapped__ = fn  # pyright: ignore[reportAttributeAccessIssue]  (as functools.wraps does)
    return partial


def _run_guarded(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    call, result = flatten_call(fn, args, kwargs), Result()
    program = jax.make_jaxpr(call.flat_function(result))(*call.arrays)
    guarded = errors_of(fn).guard(program)
    return result.tree_and_writes(jaxpr_as_fun(guarded)(*call.arrays))[0], guarded is not program


def _nans(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The result of `equinox.error_if` where an error cannot be raised: a loop that compares with it ends."""
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, np.iinfo(dtype).max, dtype)
    return np.full(shape, True if dtype == np.bool_ else np.nan, dtype)

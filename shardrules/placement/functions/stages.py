"""The results of `filter_jit(...).lower(...)`: `jax.stages` for the function's own arguments."""

from collections.abc import Callable, Mapping
from typing import Any, final

import attrs
import jax


@final
@attrs.frozen(eq=False)
class CompiledFunction:
    """A compiled function; call it as you call the function."""

    compiled: jax.stages.Compiled
    """The program that JAX compiled, of the arrays alone."""
    _run: Callable[..., Any] = attrs.field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, on arguments as it was lowered for: other arrays of the same shapes."""
        return self._run(self.compiled, args, kwargs)

    def as_text(self) -> str | None:
        """Returns the optimized program."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        """Returns the bytes per device of arguments, results and temporaries, as XLA counts them."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """Returns XLA's own counts of operations and bytes, which count the body of a loop once."""
        return self.compiled.cost_analysis()


@final
@attrs.frozen(eq=False)
class LoweredFunction:
    """A function lowered for some arguments."""

    lowered: jax.stages.Lowered
    """The program that JAX lowered, of the arrays alone."""
    _run: Callable[..., Any] = attrs.field(repr=False)

    def compile(self, compiler_options: Mapping[str, str | bool] | None = None) -> CompiledFunction:
        """Compiles the program, for the devices that its arguments are on."""
        return CompiledFunction(
            self.lowered.compile(None if compiler_options is None else dict(compiler_options)), self._run
        )

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Returns the program before it is optimized."""
        return self.lowered.as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Returns the program as an object of the compiler."""
        return self.lowered.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """Returns XLA's estimate of operations and bytes before it optimizes."""
        return self.lowered.cost_analysis()

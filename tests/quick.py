"""How programs for CPUs compile in half of the time, in test processes and in those that they start."""

from importlib.metadata import version

QUICK_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
"""For the environment variable XLA_FLAGS. Layouts and collectives stay as users have them."""

USUAL_KERNELS: dict[str, bool] = {}
"""Compiler options with which a program has the kernels that users have, for tests of kernels."""

if version("jaxlib").startswith("0.10."):
    # Later versions refuse this flag, and there all tests run with XLA's newer emitters.
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
    USUAL_KERNELS["xla_cpu_use_fusion_emitters"] = True

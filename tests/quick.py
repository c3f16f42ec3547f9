"""How programs for CPUs compile in less time, in test processes and in those that they start."""

QUICK_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
"""For the environment variable XLA_FLAGS. The programs stay as users have them."""

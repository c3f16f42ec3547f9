"""The sheet of hardware of a device, by its name in JAX."""

_GPUS = {"A100": "cuda:a100", "H100": "cuda:h100", "H200": "cuda:h200", "B200": "cuda:b200"}
_TPUS = {
    "TPU v2": "tpu:v2",
    "TPU v3": "tpu:v3",
    "TPU v4": "tpu:v4",
    "TPU v5 lite": "tpu:v5e",
    "TPU v5e": "tpu:v5e",
    "TPU v5": "tpu:v5p",
    "TPU v5p": "tpu:v5p",
    "TPU v6 lite": "tpu:v6e",
    "TPU v6e": "tpu:v6e",
    "TPU7x": "tpu:v7x",
}
"""By a part of the name for GPUs, by all of it for TPUs."""


def sheet_name(platform: str, device_kind: str) -> str | None:
    """Returns the name of the sheet for a device's `platform` and `device_kind`; `None` where there is none."""
    if platform == "cpu":
        return "cpu"
    if platform == "tpu":
        return _TPUS.get(device_kind)
    return next((sheet for name, sheet in _GPUS.items() if name in device_kind), None)

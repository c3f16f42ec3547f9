"""The time to read and write the memory of a device."""

from shardrules.programs.machine.hardware import Hardware, fraction
from shardrules.programs.machine.measured import Access


def traffic_seconds(nbytes: float, hardware: Hardware, access: Access = "copy") -> float:
    """The time of a kernel that reads and writes `nbytes` in all, without its launch."""
    return nbytes / (hardware.memory_bytes_per_second * fraction(hardware.memory_fractions, access))


def host_seconds(nbytes: float, hardware: Hardware) -> float:
    """The time of a device to send `nbytes` to the memory of its host, or to fetch as much from there."""
    return nbytes / hardware.host_link_bytes_per_second

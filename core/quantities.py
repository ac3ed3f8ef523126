"""Words for sizes, durations and ends of processes, for people: pure. `config` reads those that people write."""

import signal


def size(nbytes: int | None) -> str:
    """Three digits or so and a binary unit."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:  # not 1024: four digits are harder to read than a fraction
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def sizes(*nbytes: int) -> tuple[str, ...]:
    """Sizes that are compared: to the byte if two that differ would be told as the same."""
    told = tuple(size(each) for each in nbytes)
    alike = len(set(told)) < len(set(nbytes))
    return tuple(f"{each:,} bytes" for each in nbytes) if alike else told


def duration(ms: float) -> str:
    """Three digits or so, in a unit that makes them less than some hundreds."""
    if abs(ms) < 1000:
        return f"{_digits(round(ms, 2))} ms"
    value, unit = ms / 1000, "s"
    for larger, count in (("min", 60), ("h", 60), ("d", 24)):
        if abs(value) < 2 * count:
            break
        value, unit = value / count, larger
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


def ended(status: int) -> str:
    """The end of a process with this exit status, negative for a signal's number."""
    return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"

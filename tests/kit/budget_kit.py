"""What went out, seen over every window."""


def most_in_any_window(sent: list[tuple[int, int]], window_ns: int) -> int:
    """The most bytes in any closed window, by two pointers; `sent` is (time, bytes) in order."""
    most = total = start = 0
    for at_ns, size in sent:
        total += size
        while sent[start][0] < at_ns - window_ns:
            total -= sent[start][1]
            start += 1
        most = max(most, total)
    return most

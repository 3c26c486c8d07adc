"""Fit the cost model's coefficients to measured times: least squares of relative errors, nothing negative."""

from collections.abc import Sequence

SWEEPS = 20_000


def fit_coefficients(work: Sequence[Sequence[float]], times_us: Sequence[float]) -> tuple[float, ...]:
    """Coefficients whose products with each row of ``work`` come near each time, relative to it.

    Args:
        work: a row of :meth:`Shape.work` a measurement.
        times_us: microseconds, above 0.

    Returns:
        A coefficient, 0 or more, a column.
    """
    rows = [[amount / time for amount in row] for row, time in zip(work, times_us, strict=True)]
    columns = range(len(rows[0]))
    largest = [max(row[j] for row in rows) or 1.0 for j in columns]
    rows = [[amount / scale for amount, scale in zip(row, largest, strict=True)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    target = [sum(row[j] for row in rows) for j in columns]
    found = [0.0 for _ in columns]
    for _ in range(SWEEPS):
        moved = 0.0
        for j in columns:
            if gram[j][j] == 0.0:
                continue
            slope = target[j] - sum(g * x for g, x in zip(gram[j], found, strict=True))
            value = max(0.0, found[j] + slope / gram[j][j])
            moved, found[j] = max(moved, abs(value - found[j])), value
        if moved < 1e-12:
            break
    return tuple(value / scale for value, scale in zip(found, largest, strict=True))

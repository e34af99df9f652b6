"""Metric families from plain numbers, by the values of their labels."""

from __future__ import annotations

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for combination, value in values.items():
        family.add_metric(combination, value)
    return family


def counter(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for combination, value in values.items():
        family.add_metric(combination, value)
    return family


def total(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return counter(name, text, (), {(): value})

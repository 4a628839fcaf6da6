"""Computes findings from samples: a ratio with interval for each pair of stacks and each headline metric. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

from snapmgr.bench.model import MetricInfo
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, LEVEL, Noise, Ratio, have_ratio, noise_floor, paired_ratio
from snapmgr.bench.statistics.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.verdict import Verdict

Sample: TypeAlias = "Mapping[str, Any]"
# Figures of a metric, each with the id of its sample: by run and block, then by stack.
Blocks: TypeAlias = "dict[tuple[str, int], dict[str, tuple[float, str]]]"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How two stacks compare in one metric of one experiment."""

    id: str
    """"random-update/update_s/btrfs/ext4"; the same whichever of the two comes first."""
    experiment: str
    """Scenario, and its variant if it has several: "random-update database"."""
    metric: MetricInfo
    stack: str
    against: str
    ratio: Ratio
    """Ratio of `stack` to `against`."""
    samples: tuple[str, ...]
    """Ids of its samples."""
    noise: Noise | None = None
    """Noise of the metric in this experiment; None if there are too few A/A pairs."""

    @property
    def verdict(self) -> Verdict:
        """Return whether `stack` is shown to be better or worse than `against`."""
        return judge(self.ratio, self.metric.better, noise=self.noise)

    def seen_from(self, stack: str) -> Finding:
        """Return the finding with `stack`, one of the two, as the first. Raises ValueError if it is neither."""
        if stack == self.stack:
            return self
        if stack != self.against:
            raise ValueError(f"{self.id} says nothing about {stack}")
        return replace(self, stack=stack, against=self.stack, ratio=self.ratio.inverse())


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings from a set of samples."""

    found: tuple[Finding, ...]
    problems: tuple[str, ...] = ()
    """Sentences that name each comparison that could not be made."""


def experiment_of(sample: Sample) -> str:
    """Return the name of a sample's experiment: its scenario and its variant."""
    return f"{sample['scenario']} {sample['variant']}".rstrip()


def usable(sample: Sample) -> bool:
    """Return whether a sample counts: it was measured, did not fail, and passed every check."""
    return (
        sample["kind"] in {"measured", "a/a"}
        and not sample["failure"]
        and all(check["ok"] for check in sample["checks"])
    )


def comparisons(samples: Iterable[Sample]) -> int:
    """Return the expected number of ratios: one for each pair of stacks in each headline metric, and at least 1.

    Pilots count as well: the number is the same at the beginning of a run and at its end.
    """
    stacks: dict[str, set[str]] = defaultdict(set)
    metrics: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        if not sample["failure"]:
            stacks[experiment_of(sample)].add(sample["stack"])
            metrics[experiment_of(sample)].update(info.name for info in _headlines(sample))
    return max(1, sum(len(who) * (len(who) - 1) // 2 * len(metrics[name]) for name, who in stacks.items()))


def findings(samples: Iterable[Sample], *, seed: int, level: float = LEVEL, family: int | None = None) -> Findings:
    """Given documents of samples, return their findings in the headline metrics.

    Pairs are made within a block of a run. `family` is the number of comparisons that `level` covers; None:
    `comparisons(samples)`. `problems` lists pairs of stacks without a ratio because a figure is 0.
    """
    samples = list(samples)
    family = comparisons(samples) if family is None else family
    experiments: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if usable(sample):
            experiments[experiment_of(sample)].append(sample)
    found: list[Finding] = []
    problems: list[str] = []
    for experiment, ours in experiments.items():
        infos = {info.name: info for sample in ours for info in _headlines(sample)}
        stacks = sorted({sample["stack"] for sample in ours})
        for metric in infos.values():
            blocks, twins = _figures(ours, metric.name)
            noise, unfit = _noise(blocks, twins, seed=seed, level=level)
            if unfit:
                problems.append(
                    f"{experiment}: {metric.title} is 0 in an A/A pair of {' and of '.join(unfit)}: the noise is that "
                    "of the others."
                )
            without: list[str] = []
            for stack, against in combinations(stacks, 2):
                both = [block for _, block in sorted(blocks.items()) if stack in block and against in block]
                if not both:
                    problems.append(f"{experiment}: no block has {metric.title} of both {stack} and {against}.")
                    continue
                pairs = [(block[stack][0], block[against][0]) for block in both]
                if not have_ratio(pairs):
                    without.append(f"{stack} and {against}")
                    continue
                found.append(
                    Finding(
                        id=f"{experiment.replace(' ', '-')}/{metric.name}/{stack}/{against}",
                        experiment=experiment,
                        metric=metric,
                        stack=stack,
                        against=against,
                        ratio=paired_ratio(pairs, seed=seed, level=level, comparisons=family),
                        samples=tuple(block[name][1] for block in both for name in (stack, against)),
                        noise=noise,
                    )
                )
            if without:
                problems.append(
                    f"{experiment}: {metric.title} is 0 in some samples, so that there is no ratio of "
                    f"{', nor of '.join(without)}."
                )
    return Findings(found=tuple(found), problems=tuple(problems))


def narrow_enough(
    samples: Iterable[Sample],
    experiment: str,
    blocks: int,
    *,
    within: float,
    family: int,
    seed: int,
) -> bool:
    """Return whether the first `blocks` blocks of an experiment give all ratios to ± `within` (0.1: 10 %).

    `schedule.next_sample` uses it. Without any ratio (one stack only) there is nothing to wait for: True.
    """
    first = [
        sample
        for sample in samples
        if sample["kind"] == "measured" and sample["block"] <= blocks and experiment_of(sample) == experiment
    ]
    return all(one.ratio.narrower_than(within) for one in findings(first, seed=seed, family=family).found)


def noise_of(samples: Iterable[Sample], metric: str, *, seed: int) -> Noise | None:
    """Return the noise of a metric in samples of one experiment, of one or several runs; None if it is unknown."""
    blocks, twins = _figures([sample for sample in samples if usable(sample)], metric)
    return _noise(blocks, twins, seed=seed, level=LEVEL)[0]


def _headlines(sample: Sample) -> list[MetricInfo]:
    infos = sample["infos"]
    return [
        # Fields of a later version are ignored.
        MetricInfo(name=name, title=info["title"], unit=info["unit"], better=info["better"], headline=True)
        for name, info in infos.items()
        if info.get("headline")
    ]


def _figures(samples: Sequence[Sample], metric: str) -> tuple[Blocks, Blocks]:
    """Return the figures of a metric by block and stack: those of the regular samples, and those of the A/A twins."""
    found: tuple[Blocks, Blocks] = ({}, {})
    for sample in samples:
        if metric in sample["metrics"]:
            blocks = found[sample["kind"] == "a/a"]
            block = blocks.setdefault((sample["run"], sample["block"]), {})
            block[sample["stack"]] = (float(sample["metrics"][metric]), sample["id"])
    return found


def _noise(blocks: Blocks, twins: Blocks, *, seed: int, level: float) -> tuple[Noise | None, list[str]]:
    """Return the difference within A/A pairs, None if there are too few; and the stacks without a ratio.

    All pairs of such a stack are left out: those without a 0 say too little about it.
    """
    pairs = [
        (stack, (blocks[place][stack][0], figure))
        for place, block in sorted(twins.items())
        for stack, (figure, _) in block.items()
        if stack in blocks.get(place, ())
    ]
    unfit = sorted({stack for stack, pair in pairs if not have_ratio([pair])})
    fit = [pair for stack, pair in pairs if stack not in unfit]
    return (noise_floor(fit, seed=seed, level=level) if len(fit) >= LEAST_PAIRS else None), unfit

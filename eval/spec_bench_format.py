"""Answers of a measured point in the format of Spec-Bench, whose own scripts then compute their figures from them.

    python -m specdec.eval.spec_bench_format run=FOLDER out_dir=FOLDER

One file per variant, and the target's tokenizer beside them, which Spec-Bench's speed.py asks for. See docs/peers.md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from specdec.api import load_tokenizer_of
from specdec.errors import ConfigError, InputError, SpecdecError
from specdec.eval.entry import check_folder
from specdec.eval.hydra_main import hydra_main
from specdec.eval.records import RECORDS, Records, RequestRecord, Sample, read_records

console = Console()
# Spec-Bench knows MT-bench's questions by these, ten numbers each from 81 on; `prompts=spec_bench` makes them one.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_FIRST_MT_BENCH = 81


def write_answers(records: Records, variant: str, path: Path, tokenizer: Any, model_id: str) -> int:
    """Write a variant's answers of the first repeat, a line per conversation, and return the number of lines.

    Args:
        records: of a point that was run one request at a time.
        variant: one of its variants.
        path: a .jsonl file; written anew.
        tokenizer: the target's, with `decode`.
        model_id: what the lines call the variant.

    Raises:
        ConfigError: the point has no such variant.
        InputError: it was run in batches, or the variant has not answered everything.
    """
    names = [info.name for info in records.header.variants]
    if variant not in names:
        raise ConfigError(f"the run has no variant {variant!r}; it has: {', '.join(names)}")
    if records.header.batch_size != 1:
        raise InputError(
            f"the run has batch_size={records.header.batch_size}; Spec-Bench's format holds the time of each answer "
            "alone: measure with batch_size=1"
        )
    first = [sample for sample in records.of(variant) if sample.repeat == 0]
    found = {sample.requests[0].case: sample for sample in first}
    cases = records.header.cases
    missing = [case.name for i, case in enumerate(cases) if i not in found]
    if missing:
        raise InputError(f"{variant} has not answered {len(missing)} of {len(cases)} prompts ({missing[0]} first)")
    lines: dict[tuple[str, str], list[Sample]] = {}
    for i in sorted(range(len(cases)), key=lambda i: cases[i].turn):
        lines.setdefault((cases[i].name, cases[i].category), []).append(found[i])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for (name, category), samples in sorted(lines.items(), key=lambda line: _order(line[0][0])):
            entry = {"question_id": int(name) if name.isdecimal() else name, "category": _category(name, category)}
            file.write(json.dumps(entry | _answer(samples, tokenizer, model_id), ensure_ascii=False) + "\n")
    return len(lines)


def _order(name: str) -> tuple[int, int, str]:
    """Return a key that sorts numbers as numbers, before other names."""
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)


def _category(name: str, category: str) -> str:
    number = int(name) - _FIRST_MT_BENCH if name.isdecimal() else -1
    if category == "mt_bench" and 0 <= number < 10 * len(_MT_BENCH):
        return _MT_BENCH[number // 10]
    return category


def _answer(samples: list[Sample], tokenizer: Any, model_id: str) -> dict[str, Any]:
    """Return what a line says of the turns of one conversation."""
    requests = [sample.requests[0] for sample in samples]
    steps = [_accept_lengths(request) for request in requests]
    choice = {
        "index": 0,
        "turns": [tokenizer.decode(r.token_ids, skip_special_tokens=True).strip() for r in requests],
        "decoding_steps": [len(lengths) for lengths in steps],
        "new_tokens": [len(request.token_ids) for request in requests],
        "wall_time": [sample.total_s for sample in samples],
        "accept_lengths": [length for lengths in steps for length in lengths],
    }
    return {
        "answer_id": f"{model_id}-{requests[0].case}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }


def _accept_lengths(request: RequestRecord) -> list[int]:
    """Return the tokens that each forward gave, prefill's included, as Spec-Bench's baseline counts them."""
    return [int(tokens) for _, tokens in request.emissions]


def write_all(run: Path, out_dir: Path) -> dict[str, int]:
    """Write the answers of a point's variants but peers that gave up, and its tokenizer; return the lines by file.

    Raises:
        InputError: there is no finished point in `run`, or its target has no tokenizer.
    """
    records = read_records(run / RECORDS)
    if records.end is None:
        raise InputError(f"{run} was not measured to its end; run the same command again to go on with it")
    tokenizer = load_tokenizer_of(records.header.target)
    if tokenizer is None:
        raise InputError(f"the target {records.header.target} has no tokenizer, so its answers cannot be decoded")
    gave_up = [dropped.variant for dropped in records.dropped]  # whose answers are not whole
    names = [info.name for info in records.header.variants if info.name not in gave_up]
    files = [_file_name(name) for name in names]
    twice = [name for name, file in zip(names, files, strict=True) if files.count(file) > 1]
    if twice:
        raise InputError(f"the variants {', '.join(map(repr, twice))} would share a file; give them other names")
    written = {}
    for name in names:
        path = out_dir / f"{_file_name(name)}.jsonl"
        written[path.name] = write_answers(records, name, path, tokenizer, name)
    tokenizer.save_pretrained(out_dir / "tokenizer")
    return written


def _file_name(variant: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in variant)


@hydra_main("spec_bench_format")
def main(config: DictConfig) -> None:
    """Read, write, say what was written."""
    for name in ("run", "out_dir"):
        if not isinstance(config[name], str):
            raise ConfigError(f"{name}={config[name]}; needed: run=FOLDER of a measured point, out_dir=FOLDER to write")
    run, out_dir = Path(config.run), Path(config.out_dir)
    check_folder(out_dir, "out_dir")
    try:
        written = write_all(run, out_dir)
    except SpecdecError:
        raise
    except OSError as error:
        raise InputError(f"{out_dir} cannot be written ({error})") from error
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"the records of {run} do not fit together ({type(error).__name__}: {error})") from error
    for name, lines in written.items():
        console.print(Text(f"{out_dir / name}: {lines} lines"), soft_wrap=True)


if __name__ == "__main__":
    main()

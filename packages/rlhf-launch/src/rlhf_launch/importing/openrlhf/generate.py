"""OpenRLHF's `batch_inference`: `rlhf generate`, or `rlhf score` and `rlhf select`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Outcome, Rule, combined, needless, to
from rlhf_launch.importing.openrlhf.common import ENGINE, datasets, write_template

_OF_ENGINES = (
    "attn_implementation",
    "flash_attn",
    "local_rank",
    "full_determinism",
    "disable_fast_tokenizer",
    "use_ms",
)

GENERATE: Mapping[str, Rule] = {
    **{name: ENGINE[name] for name in (*_OF_ENGINES, "bf16", "param_dtype", "seed")},
    "eval_task": combined(),
    "pretrain": to("model.path"),
    "output_path": to("output"),
    "dataset": combined(),
    "dataset_probs": combined(),
    "dataset_split": combined(),
    "max_samples": combined(),
    "input_key": combined(),
    "output_key": needless("the samples lie under names of our own in the file that is written"),
    "input_template": combined(),
    "apply_chat_template": combined(),
    "prompt_max_len": to("lengths.max_prompt_tokens", convert=int),
    "max_new_tokens": to("rollout.sampling.max_tokens", convert=int),
    "max_len": needless("prompt and response have bounds of their own"),
    "greedy_sampling": to("rollout.sampling.temperature", convert=lambda _: 0.0),
    "temperature": to("rollout.sampling.temperature", convert=float),
    "top_p": to("rollout.sampling.top_p", convert=float),
    "repetition_penalty": to("rollout.sampling.repetition_penalty", convert=float),
    "best_of_n": to("rollout.samples_per_prompt", convert=int),
    "tp_size": to("rollout.tensor_parallel_size", convert=int),
    "max_num_seqs": to("rollout.max_num_seqs", convert=int),
    "enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
    "zero_stage": needless("the engine generates; nothing is trained"),
    "micro_batch_size": needless("the engine batches requests itself"),
    "iter": combined(),
    "rollout_batch_size": combined(),
    "post_processor": combined(),
    "normalize_reward": needless("levels are counted between the lowest and the highest score of the file"),
    "reward_template": combined(),
    "enable_csft": combined(),
    "csft_prompt": combined(),
    "value_head_prefix": needless("the reward model is read with its own head"),
}
GENERATE_DEFAULTS: Mapping[str, Any] = {
    "seed": 1234,
    "prompt_max_len": 1024,
    "max_new_tokens": 1024,
    "temperature": 1.0,
    "best_of_n": 1,
}
_SELECTIONS = {"rs": "best_of_n", "iter_dpo": "pairs", "csft": "conditional"}
"""Their post-processors, and our rules."""


def generation_run(draft: Draft) -> str:
    """Write what depends on several settings; the command that runs the file.

    Raises:
        ConfigError: an unknown task, or a flag that every command needs is not there.
    """
    task = str(draft.value("eval_task"))
    for name in ("pretrain", "dataset", "output_path"):
        if not draft.on(name):
            raise ConfigError(f"the command lacks --{name}")
    if task == "rm":
        return _scoring_run(draft)
    if task not in ("generate_vllm", "generate"):
        raise ConfigError(f"--eval_task {task} has no counterpart; known are generate_vllm, generate and rm")
    if draft.on("greedy_sampling"):
        draft.put("rollout.sampling.temperature", 0.0)
        draft.noted("temperature", "greedy sampling has none")
    columns = {"prompt": str(draft.value("input_key", "input"))}
    split = str(draft.value("dataset_split", "train"))
    sources = datasets(draft, "dataset", "dataset_probs", split=split, columns=columns)
    _cut_to_iteration(draft, sources)
    draft.put("data.train", sources)
    write_template(draft)
    _ask_for_reward(draft)
    draft.put("lengths.long_prompts", "drop")
    draft.put("rollout.backend", "vllm" if task == "generate_vllm" else "transformers")
    for name in ("post_processor", "reward_template"):
        draft.record(name, Outcome.MEANINGLESS, "nothing is scored by this command")
    return "rlhf generate"


def _cut_to_iteration(draft: Draft, sources: list[dict[str, Any]]) -> None:
    """`iter` and `rollout_batch_size`: the rows of one round, each round's after the last one's."""
    if "iter" not in draft.given or draft.value("iter") is None:
        draft.record("rollout_batch_size", Outcome.MEANINGLESS, "without --iter the whole file is sampled")
        return
    rows, iteration = int(draft.value("rollout_batch_size", 2048)), int(draft.value("iter"))
    if iteration:
        instead = (
            f"cut rows {iteration * rows + 1} to {(iteration + 1) * rows} into a file of their own; the rounds of "
            "a script are one file for `rlhf iterate`, in which each round may name its data"
        )
        draft.refused("iter", instead)
        draft.refused("rollout_batch_size", instead)
        return
    for source in sources:
        source["limit"] = min(rows, source.get("limit", rows))
    note = "the first rows, as limit; the rounds of a script are one file for `rlhf iterate` (docs/rounds.md)"
    draft.noted("iter", note)
    draft.noted("rollout_batch_size", note)


def _ask_for_reward(draft: Draft) -> None:
    """`enable_csft`: text behind every prompt."""
    if not draft.on("enable_csft"):
        draft.record("csft_prompt", Outcome.MEANINGLESS, "without --enable_csft it is not used")
        return
    asked = str(draft.value("csft_prompt", "<rm_score>: 5.00")).strip() + " "
    before = draft.take("data.prompt_template") or "{}"
    draft.put("data.prompt_template", before.replace("{}", "{}" + asked))
    note = "text behind the prompt, in data.prompt_template; with a chat template it is inside the user's message"
    draft.noted("enable_csft", note)
    draft.noted("csft_prompt", note)


def _scoring_run(draft: Draft) -> str:
    """A file of answers and a reward model; then a choice among them."""
    for group in ("rollout", "lengths"):
        draft.settings.pop(group, None)
    for name in ("prompt_max_len", "max_new_tokens", "temperature", "best_of_n", "top_p"):
        draft.record(name, Outcome.MEANINGLESS, "nothing is generated by this command")
    for name in ("iter", "rollout_batch_size", "enable_csft", "csft_prompt"):
        draft.record(name, Outcome.MEANINGLESS, "nothing is generated by this command")
    model = draft.value("pretrain")
    draft.put("reward.model", model)
    draft.noted("pretrain", "the reward model; model.path is it, too, for the tokenizer")
    split = str(draft.value("dataset_split", "train"))
    columns = _answer_columns(draft)
    sources = datasets(draft, "dataset", "dataset_probs", split=split, columns=columns)
    for source in sources if "messages" in columns else ():
        source["only"] = ["messages"]  # such data often has the prompt in a column of its own, too
    draft.put("data.train", sources)
    write_template(draft)
    _then_select(draft)
    return "rlhf score"


def _answer_columns(draft: Draft) -> dict[str, str]:
    """Where prompt and answer are; none of a file that `rlhf generate` wrote."""
    if draft.on("output_key"):
        return {"prompt": str(draft.value("input_key", "input")), "response": str(draft.value("output_key"))}
    if "input_key" in draft.given:
        draft.noted("input_key", "conversations, of which the last message is scored as the answer")
        return {"messages": str(draft.value("input_key"))}
    draft.noted("dataset", "read as a file of `rlhf generate`; of their own files write columns: "
                "{prompt: input, response: output}")  # fmt: skip
    return {}


def _then_select(draft: Draft) -> None:
    """`post_processor`: what is trained on is chosen by a command of its own, into the file that they write."""
    processor = draft.value("post_processor")
    if processor in (None, "", "None"):
        draft.record("reward_template", Outcome.MEANINGLESS, "without --post_processor it is not used")
        return
    kind = _SELECTIONS.get(str(processor))
    if kind is None:
        draft.refused("post_processor", f"known are {', '.join(_SELECTIONS)}; see `rlhf select`")
        return
    target = str(draft.value("output_path"))
    scored = f"{target.removesuffix('.jsonl')}.scored.jsonl"
    draft.put("output", scored)
    command = f"rlhf select {kind} {scored} -o {target}"
    if kind == "conditional":
        template = str(draft.value("reward_template", "{input} <rm_score>: {reward} "))
        ours = template.replace("{input}", "{prompt}").replace("{reward}", "{attributes}")
        command += f" {shlex.quote(f'template={json.dumps(ours)}')}"
        draft.noted("reward_template", "template of `rlhf select conditional`; the score is a level (score:5)")
    draft.noted("post_processor", f"a command of its own: {command}")
    draft.noted("output_path", f"scores go to {scored}, and what is chosen among them to this file")
    draft.remarks.append(f"Then run: {command}")

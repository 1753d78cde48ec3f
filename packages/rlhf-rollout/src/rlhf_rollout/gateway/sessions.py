"""What an agent said and heard in one session of the gateway, as a tree of turns, and as trajectories to train on.

A turn hangs below the one whose conversation it continues. A client that asks again with an edited history, or for
several choices, makes branches; every sampled token is trained in exactly one trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core import DataError, LogProbMeaning, PackedFlags, PackedFloats, PackedInts, Sample, Trajectory

from rlhf_rollout.chat.images import ChatImage, ContextImages, ConversationImages, ImageTokens
from rlhf_rollout.chat.messages import Message, digests
from rlhf_rollout.chat.tokens import ChatTokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTurn:
    """One sampled turn and the tokens that led to it."""

    parent: RecordedTurn | None
    context: PackedInts
    """Tokens since the parent's last one: templates, users, tools. The whole prompt if there is no parent."""
    sample: Sample
    meaning: LogProbMeaning
    reasoning: str = ""
    """What the turn said as reasoning: clients leave it out of the history, the template may want it."""
    images: ContextImages | None = None
    """Those of the context."""

    @property
    def path(self) -> list[RecordedTurn]:
        """The turns from the first one of the conversation to this one."""
        turns: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def token_ids(self) -> PackedInts:
        """The tokens of the whole conversation up to the end of this turn."""
        return PackedInts.joined([part for turn in self.path for part in (turn.context, turn.sample.token_ids)])

    @property
    def request_token_ids(self) -> PackedInts:
        """The same with one token for each image."""
        parts = [
            part for turn in self.path for part in (_requested(turn.context, turn.images), turn.sample.token_ids)
        ]
        return PackedInts.joined(parts)

    @property
    def shown(self) -> tuple[ChatImage, ...]:
        """The images of the whole conversation up to this turn."""
        return tuple(image for turn in self.path if turn.images is not None for image in turn.images.images)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPrompt:
    """The tokens from which the next turn of a session is sampled."""

    parent: RecordedTurn | None
    context: PackedInts
    images: ContextImages | None = None
    """Those of the context."""

    @property
    def token_ids(self) -> PackedInts:
        """The complete prompt."""
        return (self.parent.token_ids if self.parent else PackedInts()) + self.context

    @property
    def request_token_ids(self) -> PackedInts:
        """The complete prompt with one token for each image."""
        asked = _requested(self.context, self.images)
        return (self.parent.request_token_ids if self.parent else PackedInts()) + asked

    @property
    def shown(self) -> tuple[ChatImage, ...]:
        """The images of the complete prompt."""
        return (self.parent.shown if self.parent else ()) + (self.images.images if self.images else ())


def _requested(context: PackedInts, images: ContextImages | None) -> PackedInts:
    return context if images is None else images.request_token_ids


@dataclass(slots=True, kw_only=True)
class RecordedSession:
    """The turns of one agent run. Prompts may be made by several threads while one records."""

    session_id: str
    group_id: str
    """Sessions of the same task share it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Goes into every trajectory, for reward functions."""
    turns: list[RecordedTurn] = field(default_factory=list)
    misses: int = 0
    """Requests with an assistant's turn that was not sampled here, or that the client or the template changed; the
    conversation was tokenised anew for them."""
    rewards: tuple[float, ...] = ()
    """Of each turn, in the order of `turns`; what is missing at the end is 0."""
    image_tokens: ImageTokens | None = None
    """Of the model, where conversations may have images."""
    _known: dict[str, RecordedTurn] = field(default_factory=dict)

    def prompt(
        self,
        tokens: ChatTokens,
        messages: Sequence[Message],
        tools: Sequence[Any],
        options: Mapping[str, Any] | None = None,
    ) -> TurnPrompt:
        """The prompt for the next turn, on top of the longest recorded conversation that `messages` begin with.

        `options` are further variables of the chat template.
        """
        hashes = digests(messages, [list(tools), options or {}])
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = [
            {**message, "reasoning_content": turn.reasoning}
            if (turn := self._known.get(digest)) is not None and turn.reasoning
            else message
            for message, digest in zip(messages, hashes, strict=True)
        ]
        for index in reversed(spoken):
            turn = self._known.get(hashes[index])
            if turn is None or self._wrote_image(turn):
                continue
            last = turn.sample.token_ids[-1] if turn.sample.token_ids else None
            context = tokens.continuation_context(messages, tools, turn=index, last_token_id=last, options=options)
            if context is not None:
                self.misses += index != spoken[-1]
                return TurnPrompt(parent=turn, context=context.token_ids, images=context.images)
        self.misses += bool(spoken)
        context = tokens.prompt_context(messages, tools, options)
        return TurnPrompt(parent=None, context=context.token_ids, images=context.images)

    def _wrote_image(self, turn: RecordedTurn) -> bool:
        """Whether the policy itself wrote the mark of an image up to here: an engine would look for the image."""
        marks = self.image_tokens.marks if self.image_tokens is not None else ()
        return any(one.sample.token_ids.count(mark) for mark in marks for one in turn.path)

    def prompt_of_tokens(self, token_ids: PackedInts) -> TurnPrompt:
        """The prompt for a completion of `token_ids`, on top of the longest recorded turn that they begin with."""
        best: RecordedTurn | None = None
        said = PackedInts()
        for turn in tuple(self.turns):
            if turn.shown:
                continue
            known = turn.token_ids
            if len(said) < len(known) <= len(token_ids) and token_ids[: len(known)] == known:
                best, said = turn, known
        return TurnPrompt(parent=best, context=token_ids[len(said) :])

    def record(
        self,
        prompt: TurnPrompt,
        sample: Sample,
        meaning: LogProbMeaning,
        *,
        messages: Sequence[Message] | None,
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> RecordedTurn:
        """Keep a sampled turn; `messages` end with the answer as the client was told it. A completion has none."""
        turn = RecordedTurn(
            parent=prompt.parent,
            context=prompt.context,
            images=prompt.images,
            sample=sample,
            meaning=meaning,
            reasoning=messages[-1].get("reasoning_content", "") if messages else "",
        )
        self.turns.append(turn)
        if messages is not None:
            self._known[digests(messages, [list(tools), options or {}])[-1]] = turn
        return turn

    def reward_turns(self, rewards: Sequence[float]) -> None:
        """Say what each turn earned, in the order in which the turns were sampled.

        Raises:
            DataError: there are fewer turns.
        """
        if len(rewards) > len(self.turns):
            raise DataError(f"there are rewards for {len(rewards)} turns, and {len(self.turns)} were sampled")
        self.rewards = tuple(rewards)

    def trajectories(self) -> list[Trajectory]:
        """One trajectory per conversation, in the order of their last turns.

        Tokens of a turn that several conversations share are trained in the first of them and are context in the
        others. Turns of one conversation that were sampled at different temperatures come as several trajectories
        of the same tokens, each with one meaning of its log-probs.
        """
        parents = {id(turn.parent) for turn in self.turns if turn.parent is not None}
        counted: set[int] = set()
        made: list[Trajectory] = []
        for leaf in self.turns:
            if id(leaf) in parents:
                continue
            path = leaf.path
            shown = self._shown(leaf.shown)
            fresh = [turn for turn in path if id(turn) not in counted and turn.sample.length]
            counted.update(map(id, path))
            for meaning in dict.fromkeys(turn.meaning for turn in fresh):
                chosen = {id(turn) for turn in fresh if turn.meaning == meaning}
                made.append(self._trajectory(f"{self.session_id}/{len(made)}", path, chosen, meaning, shown))
        return made

    def _shown(self, images: tuple[ChatImage, ...]) -> ConversationImages | None:
        tokens = self.image_tokens
        return ConversationImages(images=images, tokens=tokens) if images and tokens is not None else None

    def _trajectory(
        self,
        name: str,
        path: list[RecordedTurn],
        chosen: set[int],
        meaning: LogProbMeaning,
        shown: ConversationImages | None,
    ) -> Trajectory:
        parts = [part for turn in path for part in _parts(turn, trained=id(turn) in chosen)]
        return Trajectory(
            sample_id=name,
            group_id=self.group_id,
            token_ids=PackedInts.joined([tokens for tokens, _ in parts]),
            response_mask=PackedFlags.joined(
                [PackedFlags.full(len(tokens), sample is not None) for tokens, sample in parts]
            ),
            rollout_log_probs=PackedFloats.joined(
                [sample.log_probs if sample else PackedFloats.full(len(tokens), 0.0) for tokens, sample in parts]
            ),
            weight_versions=PackedInts.joined(
                [sample.weight_versions if sample else PackedInts.full(len(tokens), -1) for tokens, sample in parts]
            ),
            meaning=meaning,
            truncated=path[-1].sample.finish_reason != "stop",
            metadata=self.metadata,
            rewards=self._rewards(path, chosen),
            shown=shown,
        )

    def _rewards(self, path: list[RecordedTurn], chosen: set[int]) -> list[float]:
        """The rewards of the trained turns at their last tokens; empty if there are none."""
        given = {id(turn): reward for turn, reward in zip(self.turns, self.rewards, strict=False)}
        placed: list[float] = []
        for turn in path:
            placed += [0.0] * (len(turn.context) + turn.sample.length)
            if id(turn) in chosen:
                placed[-1] += given.get(id(turn), 0.0)
        return placed if any(placed) else []


def _parts(turn: RecordedTurn, *, trained: bool) -> list[tuple[PackedInts, Sample | None]]:
    """The tokens of a turn in two parts: what led to it, and itself, with its sample if it is trained."""
    return [(turn.context, None), (turn.sample.token_ids, turn.sample if trained else None)]

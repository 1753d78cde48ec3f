"""A task set as authors of `verifiers` write them."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TasksetConfig):
    count: int = 3


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward
    async def asked(self, trace: vf.Trace) -> float:
        return 0.5 * ("+" in trace.messages[1].content)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.count):
            yield SumTask(SumData(prompt=f"{i} + 1?", system_prompt="Add.", answer=i + 1), self.config.task)


__all__ = ["SumTaskset"]

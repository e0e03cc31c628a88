"""Leaving an answer early, while a step of it is under way."""

import asyncio

from drumline.offline.llm import _ended


def test_an_answer_is_ended_although_an_interrupted_step_of_it_still_runs():
    ended = []

    async def outputs():
        try:
            while True:
                await asyncio.sleep(0.05)
                yield "token"
        finally:
            ended.append(True)

    async def left():
        answer = outputs()
        step = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        await _ended(answer)
        assert await step == "token"

    asyncio.run(left())
    assert ended == [True]

"""drumline inside this process: works come as lines of JSON, answers go back as such.

python drumline_driver.py '{"quantization": "none"}'    options of AsyncLLM
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

from drumline import AsyncLLM, SamplingParams


async def answered(llm, prompt, tokens, due):
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answer: dict[str, Any] = {"began": time.perf_counter(), "stamps": [], "counts": []}
    async for output in llm.generate(prompt, params):
        answer["stamps"].append(time.perf_counter())
        answer["counts"].append(len(output.outputs[0].token_ids))
    return answer


async def main(out):
    async with AsyncLLM(**json.loads(sys.argv[1])) as llm:
        print("{}", file=out, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            work = json.loads(line)
            began = time.perf_counter()
            answers = await asyncio.gather(
                *(
                    answered(llm, prompt, tokens, began + arrival)
                    for prompt, tokens, arrival in zip(
                        work["prompts"], work["tokens"], work["arrivals"], strict=True
                    )
                )
            )
            print(json.dumps({"answers": answers}), file=out, flush=True)


if __name__ == "__main__":
    # What an engine prints is no answer.
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(main(answers_to))

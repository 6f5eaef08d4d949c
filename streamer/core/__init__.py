"""The scheduler's pure core: values in, frozen values out.

No torch, asyncio, threads, clock, logging or random: given the same commands, facts and results it
makes the same plans, so a log replays it exactly. The engine room drives it from the GPU thread.
"""

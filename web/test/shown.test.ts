/** What the page makes of the server's values: the model's own settings. */

import { expect, test } from "vitest";
import { defaultOf, RANGES, shownValue } from "../src/chat/conversation/sampling.ts";

const range = (name: string) => RANGES.find((one) => one.name === name)!;

test("a slider stands at the model's own value until it is moved", () => {
  const session = { model: "m", context_length: 9, sampling_defaults: { temperature: 0.7, top_p: 0.9, top_k: -1, min_p: 0, repetition_penalty: 1 } };
  expect(RANGES.map((one) => defaultOf(one, session))).toEqual([0.7, 0.9, 0, 0, 1]);
  expect(defaultOf(range("temperature"), null)).toBeNull();
  expect(shownValue(range("temperature"), null, 0.7)).toBe("default 0.70");
  expect(shownValue(range("topK"), null, 50)).toBe("default 50");
  expect(shownValue(range("temperature"), 0.2, 0.7)).toBe("0.20");
  expect(shownValue(range("temperature"), null, null)).toBe("model default");
});

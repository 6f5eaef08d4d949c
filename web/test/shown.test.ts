/** What the page makes of the server's values: the model's own settings, and lengths of refused requests. */

import { expect, test } from "vitest";
import { ClientError } from "../src/client/index.ts";
import { defaultOf, RANGES, shownValue } from "../src/chat/conversation/sampling.ts";
import { refusedTokens } from "../src/chat/conversation/answer.ts";
import { lengthOf } from "../src/chat/message/figures.ts";

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

test("what is too long says how long it is, as far as the server counted", () => {
  const refused = (what: string, code = "context_length_exceeded") => new ClientError(`This model's maximum context length is 1024 tokens, and the prompt is too long: ${what}`, 400, code);
  const counted = refused("it has 3012, which leaves no room for an answer");
  expect(refusedTokens(counted)).toEqual({ count: 3012, isAtLeast: false });
  expect(lengthOf(counted, 1024)).toBe(": it has 3,012 tokens, and with its answer it may have 1,024");
  expect(lengthOf(refused("a text of 90000 bytes has at least 3000 tokens"), 1024)).toContain("at least 3,000 tokens");
  expect(lengthOf(counted, 1024, true)).toContain("3,012 tokens with the system prompt, and");
  expect(lengthOf(counted, undefined)).toBe("");
  expect(lengthOf(refused("for other reasons"), 1024)).toBe("");
  expect(refusedTokens(refused("it has 3012", "gone"))).toBeNull();
});

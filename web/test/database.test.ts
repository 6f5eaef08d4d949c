/** Deleted chats stay deleted, and a failing store is noticed. */

import { beforeEach, expect, test, vi } from "vitest";
import { Answer } from "../src/chat/conversation/answer.ts";
import { Conversation, type Message } from "../src/chat/conversation/conversation.ts";
import { drop, isKept, keepMessage, keepSoon } from "../src/chat/history/database.ts";

const put = vi.hoisted(() => vi.fn());
const nothing = { index: () => ({ getAllKeys: () => [] }), delete: () => undefined };
vi.mock("idb", () => ({ openDB: () => Promise.resolve({ put, transaction: () => ({ objectStore: () => nothing }) }) }));

let conversation: Conversation;
let message: Message;
beforeEach(() => {
  vi.useFakeTimers();
  put.mockReset();
  conversation = new Conversation();
  message = conversation.add({ role: "assistant", parent: null, text: "", answer: new Answer({ ask: {}, fork: null }) });
});

test("an answer that grows is written now and then, whole", async () => {
  for (const text of ["one", "one two"]) {
    message.answer!.text.value = text;
    keepSoon(conversation, message);
  }
  await vi.runAllTimersAsync();
  expect(put.mock.calls.map(([store, record]) => [store, record.answer.text])).toEqual([["messages", "one two"]]);
});

test("a chat that is deleted while its answer grows is not written again", async () => {
  keepSoon(conversation, message);
  drop(conversation);
  keepMessage(conversation, message);
  await vi.runAllTimersAsync();
  expect(put).not.toHaveBeenCalled();
});

test("a full disk is reported, until there is room again", async () => {
  put.mockRejectedValueOnce(new DOMException("", "QuotaExceededError"));
  keepMessage(conversation, message);
  await vi.runAllTimersAsync();
  expect(isKept.value).toBe(false);
  keepMessage(conversation, message);
  await vi.runAllTimersAsync();
  expect(isKept.value).toBe(true);
});

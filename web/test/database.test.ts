/** Deleted chats stay deleted, a failing store is noticed, and what is not written is left to the next page. */

import { beforeEach, describe, expect, test, vi } from "vitest";
import { Answer } from "../src/chat/conversation/answer.ts";
import { Conversation, type Message } from "../src/chat/conversation/conversation.ts";
import { drop, isKept, keepMessage, keepSoon } from "../src/chat/history/database.ts";
import { asKeptMessage } from "../src/chat/history/records.ts";

const put = vi.hoisted(() => vi.fn());
const getAll = vi.hoisted(() => vi.fn());
const nothing = { index: () => ({ getAllKeys: () => [] }), delete: () => undefined };
vi.mock("idb", () => ({ openDB: () => Promise.resolve({ put, getAll, transaction: () => ({ objectStore: () => nothing }) }) }));

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

describe("what is not written when the page is left", () => {
  const session = new Map<string, string>();
  const never = () => new Promise(() => undefined);
  beforeEach(() => {
    session.clear();
    const sessionStorage = { getItem: (name: string) => session.get(name) ?? null, setItem: (name: string, value: string) => session.set(name, value), removeItem: (name: string) => session.delete(name) };
    vi.stubGlobal("window", { sessionStorage });
  });

  /** The module of a page of its own. */
  async function page() {
    vi.resetModules();
    return import("../src/chat/history/database.ts");
  }

  /** What the next page has, where the database had `written`. */
  async function next(written: { conversations?: unknown[]; messages?: unknown[] } = {}) {
    getAll.mockImplementation((name: "conversations" | "messages") => Promise.resolve(written[name] ?? []));
    const { conversations, messages, unanswered } = await (await page()).load();
    return { chats: conversations.map(({ id }) => id), messages: messages.map(({ answer }) => answer && [answer.text, answer.responseId, answer.status]), unanswered: [...unanswered] };
  }

  test("is there on the tab's next page, and on the one after it", async () => {
    put.mockImplementation(never);
    const left = await page();
    left.keepConversation(conversation);
    left.keepMessage(conversation, message);
    Object.assign(message.answer!, { responseId: "r1" });
    message.answer!.status.value = "running";
    message.answer!.text.value = "one two";
    left.keepSoon(conversation, message);
    left.leave();
    const expected = { chats: [conversation.id], messages: [["one two", "r1", "running"]], unanswered: [] };
    expect(await next()).toEqual(expected);
    const second = await page();
    session.set("streamer.unwritten", JSON.stringify([{ type: "message", record: asKeptMessage(conversation, message) }]));
    void second.load(); // which does not get to the end
    second.leave();
    expect((await next()).messages).toEqual(expected.messages);
  });

  test("is nothing once it is written, but an answer without an id is requested again", async () => {
    put.mockResolvedValue(undefined);
    const left = await page();
    left.keepConversation(conversation);
    left.keepMessage(conversation, message);
    await vi.runAllTimersAsync();
    left.leave();
    expect(await next()).toEqual({ chats: [], messages: [["", null, "sending"]], unanswered: [message.id] });
    await vi.runAllTimersAsync();
    Object.assign(message.answer!, { responseId: "r1" });
    left.keepMessage(conversation, message);
    await vi.runAllTimersAsync();
    left.leave();
    expect(session.size).toBe(0);
  });

  test("deletes a chat that was deleted", async () => {
    put.mockImplementation(never);
    const left = await page();
    left.keepConversation(conversation);
    left.keepMessage(conversation, message);
    left.drop(conversation);
    left.leave();
    expect(await next({ conversations: [{ id: conversation.id }] })).toEqual({ chats: [], messages: [], unanswered: [] });
  });

  test("gives way to what another tab wrote of the answer's end", async () => {
    put.mockImplementation(never);
    const left = await page();
    Object.assign(message.answer!, { responseId: "r1" });
    message.answer!.status.value = "running";
    left.keepMessage(conversation, message);
    left.leave();
    const record = asKeptMessage(conversation, message);
    const ended = (responseId: string) => ({ messages: [{ ...record, answer: { ...record.answer, responseId, text: "all", status: "completed" } }] });
    const state = session.get("streamer.unwritten")!;
    expect((await next(ended("r1"))).messages).toEqual([["all", "r1", "completed"]]);
    session.set("streamer.unwritten", state);
    expect((await next(ended("r0"))).messages).toEqual([["", "r1", "running"]]); // it was continued since
  });
});

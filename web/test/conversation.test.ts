/** The tree of a conversation, and its way into records and files and back. */

import { beforeAll, describe, expect, test, vi } from "vitest";
import { Answer } from "../src/chat/conversation/answer.ts";
import { Conversation, inputFor, latestBelow, siblings, type Message } from "../src/chat/conversation/conversation.ts";
import { asKeptConversation, asKeptMessage, fromFile, merge, toConversation, toFile } from "../src/chat/history/records.ts";

beforeAll(() => vi.stubGlobal("cancelAnimationFrame", () => undefined));

function answered(conversation: Conversation, parent: Message, text: string): Message {
  const answer = new Answer({ ask: { temperature: 0.5 }, fork: null });
  write(answer, text);
  answer.status.value = "completed";
  return conversation.add({ role: "assistant", parent, text: "", answer });
}

function write(answer: Answer, text: string): void {
  answer.text.value = text;
  answer.pieces.value = text ? [{ kind: "text", text, isDone: true }] : [];
}

function asked(conversation: Conversation, parent: Message | null, text: string): Message {
  return conversation.add({ role: "user", parent, text, answer: null });
}

/** One question with two answers; the first goes on, the second is shown. */
function branched() {
  const conversation = new Conversation();
  const first = asked(conversation, null, "Why?");
  const one = answered(conversation, first, "Because.");
  const more = asked(conversation, one, "And?");
  const end = answered(conversation, more, "So.");
  const two = answered(conversation, first, "No reason.");
  return { conversation, first, one, more, end, two };
}

describe("the tree", () => {
  test("shows one path", () => {
    const { conversation, first, two } = branched();
    expect(conversation.path.value).toEqual([first, two]);
    expect(conversation.title.value).toBe("Why?");
  });

  test("has siblings, and goes back to where a branch ended", () => {
    const { conversation, one, two, end } = branched();
    expect(siblings(conversation.messages.value, one)).toEqual([one, two]);
    expect(latestBelow(conversation.messages.value, one)).toBe(end);
  });

  test("sends what is on the path alone, less what nothing answered", () => {
    const { conversation, more, end } = branched();
    expect(inputFor(more)).toEqual([
      { role: "user", content: "Why?" },
      { role: "assistant", content: "Because." },
      { role: "user", content: "And?" },
    ]);
    const empty = answered(conversation, asked(conversation, end, "Lost."), "");
    expect(inputFor(asked(conversation, empty, "Now?")).map((item) => item.content)).toEqual(["Why?", "Because.", "And?", "So.", "Now?"]);
  });

  test("sends questions that waited together as one turn", () => {
    const { conversation, two } = branched();
    const last = asked(conversation, asked(conversation, two, "One."), "Two.");
    expect(inputFor(last).map((item) => item.content)).toEqual(["Why?", "No reason.", "One.\n\nTwo."]);
  });

  test("shows what could stand in its place when a message is taken away", () => {
    const { conversation, one, two } = branched();
    const question = asked(conversation, two, "Well?");
    conversation.remove(question);
    expect(conversation.leaf.value).toBe(two);
    conversation.remove(two);
    expect(conversation.path.value).toContain(one);
  });

  test("shows answers side by side only where one of them is its end", () => {
    const { conversation, one, two, more } = branched();
    conversation.beside.value = [one, two];
    expect(conversation.ends.value).toEqual([one, two]);
    conversation.leaf.value = more;
    expect(conversation.ends.value).toEqual([more]);
  });
});

describe("records", () => {
  test("come back as they were, in whatever order they are read", () => {
    const { conversation } = branched();
    const messages = conversation.messages.value.map((message) => asKeptMessage(conversation, message));
    const again = toConversation(asKeptConversation(conversation), messages.reverse());
    expect(toFile([again])).toEqual(toFile([conversation]));
  });

  test("of an answer that was live wait to be followed; without an id it is lost", () => {
    const { two } = branched();
    const kept = { ...two.answer!.keep(), status: "running" as const };
    expect(Answer.of({ ...kept, responseId: "resp_1" }).isUnfinished).toBe(true);
    const lost = Answer.of({ ...kept, responseId: null });
    expect([lost.isUnfinished, lost.status.value]).toEqual([false, "gone"]);
  });
});

describe("files", () => {
  test("have everything but the server's ids, and come in under the ids they have", () => {
    const { conversation, one } = branched();
    one.answer!.responseId = "resp_1";
    const [again] = fromFile(JSON.stringify(toFile([conversation])));
    expect(again!.id).toBe(conversation.id);
    expect(again!.path.value.map((m) => m.answer?.text.value ?? m.text)).toEqual(["Why?", "No reason."]);
    expect(again!.messages.value.every((m) => m.answer?.responseId == null)).toBe(true);
    expect(again!.messages.value.map((m) => m.id)).toEqual(conversation.messages.value.map((m) => m.id));
  });

  test("of a chat that is there add what is new in them, once", () => {
    const { conversation, end } = branched();
    const file = () => fromFile(JSON.stringify(toFile([conversation])))[0]!;
    const own = file();
    expect(merge(own, file())).toBe(0);
    asked(conversation, end, "And then?");
    expect([merge(own, file()), merge(own, file())]).toEqual([1, 0]);
    expect(own.messages.value.map((m) => m.id)).toEqual(conversation.messages.value.map((m) => m.id));
  });

  const good = () => toFile([branched().conversation]) as unknown as { conversations: Record<string, unknown>[] };
  test.each([
    ["no JSON", () => "{"],
    ["another format", () => JSON.stringify({ ...good(), format: "x" })],
    ["a later version", () => JSON.stringify({ ...good(), version: 2 })],
    ["no messages", () => JSON.stringify({ ...good(), conversations: [{ ...good().conversations[0], messages: 1 }] })],
    ["a role of its own", () => JSON.stringify(good()).replace('"role":"user"', '"role":"root"')],
    ["an id that is none", () => JSON.stringify(good()).replace(/"id":"\w+"/, '"id":"../x"')],
    ["an answer of another shape", () => JSON.stringify(good()).replace('"figures":{', '"figures":1,"x":{')],
  ])("are refused: %s", (_, text) => expect(() => fromFile(text())).toThrow(/This file/));
});

/** The chat: the thread, which follows its end unless the reader scrolled away, and the composer. */

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { isConnected } from "../app/connection.ts";
import { Composer } from "./composer.tsx";
import type { Conversation } from "./conversation.ts";
import { send } from "./asking.ts";
import { AnswerView, Question } from "./message.tsx";
import { loadMarkdown } from "./prose.tsx";
import { announcement, current } from "./store.ts";

const IDEAS = ["What is PagedAttention?", "Tell me a short story about a fox.", "How does continuous batching work?"];
const NEAR_PX = 60;

export function focusComposer(): void {
  document.getElementById("prompt")?.focus();
}

export function ChatPane() {
  const conversation = current.value;
  useEffect(focusComposer, [conversation]);
  useEffect(loadMarkdown, []); // after the first paint, before the first answer
  const isEmpty = conversation.path.value.length === 0;
  return (
    <main class="pane chat">
      <h1 class="sr">{conversation.title}</h1>
      <Thread conversation={conversation} isEmpty={isEmpty} />
      <Composer />
      <div class="sr" role="status">
        {announcement}
      </div>
    </main>
  );
}

function Thread({ conversation, isEmpty }: { conversation: Conversation; isEmpty: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  useFollowing(box, conversation);
  return (
    <div class="scroller" ref={box} tabIndex={-1}>
      {isEmpty && <Empty />}
      <div class={conversation.ends.value.length > 1 ? "thread broad" : "thread"} role="log" aria-label="Conversation" aria-live="off">
        <Messages conversation={conversation} />
      </div>
    </div>
  );
}

function Messages({ conversation }: { conversation: Conversation }) {
  const path = conversation.path.value;
  const ends = conversation.ends.value;
  const alone = ends.length > 1 ? path.slice(0, -1) : path;
  return (
    <>
      {alone.map((message) =>
        message.answer ? (
          <AnswerView key={message.id} conversation={conversation} message={message} answer={message.answer} />
        ) : (
          <Question key={message.id} conversation={conversation} message={message} />
        ),
      )}
      {ends.length > 1 && (
        <div class="columns" role="group" aria-label="Answers side by side">
          {ends.map((message, i) => message.answer && <AnswerView key={message.id} conversation={conversation} message={message} answer={message.answer} place={`Answer ${i + 1} of ${ends.length}`} />)}
        </div>
      )}
    </>
  );
}

/** Keep the end in view while the content grows, as long as the reader is there. */
function useFollowing(box: preact.RefObject<HTMLDivElement | null>, conversation: Conversation): void {
  const isAtEnd = useRef(true);
  const length = conversation.path.value.length;
  useLayoutEffect(() => {
    isAtEnd.current = true;
    const scroller = box.current;
    if (scroller) scroller.scrollTop = scroller.scrollHeight;
  }, [conversation, length]);
  useEffect(() => {
    const scroller = box.current;
    const content = scroller?.querySelector(".thread");
    if (!scroller || !content) return;
    const onScroll = () => {
      isAtEnd.current = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
    };
    const grown = new ResizeObserver(() => {
      if (isAtEnd.current) scroller.scrollTop = scroller.scrollHeight;
    });
    scroller.addEventListener("scroll", onScroll, { passive: true });
    grown.observe(content);
    return () => {
      scroller.removeEventListener("scroll", onScroll);
      grown.disconnect();
    };
  }, []);
}

function Empty() {
  return (
    <section class="empty" aria-labelledby="hello">
      <h2 id="hello">What would you like to know?</h2>
      <p>Tokens arrive over one WebSocket, as they are drawn.</p>
      <div class="ideas">
        {IDEAS.map((idea) => (
          <button key={idea} class="button idea" type="button" disabled={!isConnected.value} onClick={() => (send(idea), focusComposer())}>
            {idea}
          </button>
        ))}
      </div>
    </section>
  );
}

/**
 * The chat: the thread, which follows its end unless the reader scrolled away, and the composer.
 */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { session } from "../app/connection.ts";
import { Down, Pencil } from "../ui/icons.tsx";
import { Composer } from "./composer/composer.tsx";
import type { Conversation } from "./conversation/conversation.ts";
import { send } from "./conversation/requests.ts";
import { hit, rangesOf } from "./history/search.ts";
import { ideasFor } from "./composer/ideas.ts";
import { AnswerView, Question } from "./message/message.tsx";
import { loadMarkdown } from "./message/prose.tsx";
import { isSettingsOpen } from "./composer/settings.tsx";
import { announcement, current, isUnknown, newChat } from "./conversation/store.ts";

const NEAR_PX = 60;

export function focusComposer(): void {
  document.getElementById("prompt")?.focus();
}

export function ChatPane() {
  const conversation = current.value;
  useEffect(focusComposer, [conversation]);
  useEffect(loadMarkdown, []); // after the first paint, before the first answer
  return (
    <main class="pane chat">
      <h1 class="sr">{conversation.title}</h1>
      <Thread conversation={conversation} />
      <Composer />
      <div class="sr" role="status">
        {announcement}
      </div>
    </main>
  );
}

function Thread({ conversation }: { conversation: Conversation }) {
  const box = useRef<HTMLDivElement>(null);
  const [isAway, goToEnd] = useFollowing(box, conversation);
  useHit(box, conversation);
  const isEmpty = conversation.path.value.length === 0;
  return (
    <>
      <div class={isAway ? "scroller away" : "scroller"} ref={box} tabIndex={-1}>
        {conversation.system.value && <SystemPrompt text={conversation.system.value} />}
        {isEmpty && (isUnknown.value ? <Unknown /> : <Empty />)}
        <div class={conversation.ends.value.length > 1 ? "thread broad" : "thread"} role="log" aria-label="Conversation" aria-live="off">
          <Messages conversation={conversation} />
        </div>
      </div>
      {isAway && (
        <div class="latest">
          <button class="button icon-only" type="button" aria-label="Jump to latest" title="Jump to latest" onClick={goToEnd}>
            <Down />
          </button>
        </div>
      )}
    </>
  );
}

function SystemPrompt({ text }: { text: string }) {
  return (
    <div class="system" role="note" aria-label="System prompt">
      <b>System prompt</b>
      <p>{text}</p>
      <button class="button action" type="button" aria-label="Change the system prompt" title="Change the system prompt" aria-haspopup="dialog" onClick={() => (isSettingsOpen.value = true)}>
        <Pencil />
      </button>
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

/** Keep the end in view while the content grows and the user is there: [is away, go to the end]. */
function useFollowing(box: preact.RefObject<HTMLDivElement | null>, conversation: Conversation): [boolean, () => void] {
  const isAtEnd = useRef(true);
  const top = useRef(0); // the last scroll position
  const [isAway, setAway] = useState(false);
  const length = conversation.path.value.length;
  const follow = (scroller: HTMLDivElement) => {
    scroller.scrollTop = scroller.scrollHeight;
    top.current = scroller.scrollTop;
  };
  const goToEnd = () => {
    isAtEnd.current = true;
    const scroller = box.current;
    if (scroller) follow(scroller);
    if (document.activeElement?.closest(".latest")) scroller?.focus();
    setAway(false);
  };
  useLayoutEffect(goToEnd, [conversation, length]);
  useEffect(() => {
    const scroller = box.current;
    const content = scroller?.querySelector(".thread");
    if (!scroller || !content) return;
    const onScroll = () => {
      const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
      // the end may be far because the content grew meanwhile: only scrolling up leaves it
      if (isNear || scroller.scrollTop < top.current) isAtEnd.current = isNear;
      top.current = scroller.scrollTop;
      setAway(!isAtEnd.current);
    };
    const grown = new ResizeObserver(() => {
      if (isAtEnd.current) follow(scroller);
    });
    scroller.addEventListener("scroll", onScroll, { passive: true });
    grown.observe(content);
    grown.observe(scroller); // what is below it may grow too, or a phone's keyboard
    return () => {
      scroller.removeEventListener("scroll", onScroll);
      grown.disconnect();
    };
  }, []);
  return [isAway, goToEnd];
}

/** Scroll to the search's match in this chat and mark it, without a change to the document. */
function useHit(box: preact.RefObject<HTMLDivElement | null>, conversation: Conversation): void {
  const at = hit.value;
  useEffect(() => {
    const scroller = box.current;
    const article = at && scroller?.querySelector(`[data-message="${at.message.id}"]`);
    if (!scroller || !article) return;
    const ranges = rangesOf(article.querySelector(".text") ?? article, at.words);
    const top = (ranges[0] ?? article).getBoundingClientRect().top;
    scroller.scrollTop += top - scroller.getBoundingClientRect().top - scroller.clientHeight / 3;
    if (typeof Highlight === "undefined") return; // an older browser shows the match without a mark
    CSS.highlights.set("found", new Highlight(...ranges));
    return () => void CSS.highlights.delete("found");
  }, [at, conversation]);
}

function Empty() {
  return (
    <section class="empty" aria-labelledby="hello">
      <h2 id="hello">What would you like to know?</h2>
      <p>Tokens are streamed over a WebSocket as they are generated.</p>
      <div class="ideas">
        {ideasFor(session.value?.model).map((idea) => (
          <button key={idea} class="button idea" type="button" onClick={() => (send(idea), focusComposer())}>
            {idea}
          </button>
        ))}
      </div>
    </section>
  );
}

function Unknown() {
  return (
    <section class="empty" aria-labelledby="unknown">
      <h2 id="unknown">Chat not found</h2>
      <p>This browser has no chat with this address: it was deleted, or it is stored in another browser. A message written below starts a new chat.</p>
      <div class="ideas">
        <button class="button" type="button" onClick={newChat}>
          New chat
        </button>
      </div>
    </section>
  );
}

/** Beside everything: new chat, the conversations, and the way to the engine. A drawer on phones. */

import { signal } from "@preact/signals";
import { conversations, current, newChat, open } from "../chat/store.ts";
import { Chat, Close, Engine, Mark, Plus } from "../ui/icons.tsx";
import { hrefOf, route, type Route } from "./route.ts";

export const isSidebarOpen = signal(false);

const shut = () => (isSidebarOpen.value = false);

function To({ to, label, Icon }: { to: Route; label: string; Icon: () => preact.JSX.Element }) {
  return (
    <a class="side-link" href={hrefOf(to)} aria-current={route.value === to ? "page" : undefined} onClick={shut}>
      <Icon /> {label}
    </a>
  );
}

function History() {
  const kept = conversations.value.filter((conversation) => conversation.messages.value.length > 0);
  if (kept.length === 0) return <p class="side-note">Conversations appear here.</p>;
  return (
    <ul class="history">
      {kept.map((conversation) => (
        <li key={conversation.id}>
          <button class="side-link" type="button" aria-current={conversation === current.value || undefined} onClick={() => (open(conversation), shut())}>
            <span class="clip">{conversation.title}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}

export function Sidebar() {
  return (
    <>
      {isSidebarOpen.value && <div class="scrim" onClick={shut} />}
      <aside class="sidebar" data-open={isSidebarOpen.value} aria-label="Conversations">
        <div class="brand">
          <Mark />
          <h1>Streamer</h1>
          <button class="button icon-only phone" type="button" aria-label="Close menu" onClick={shut}>
            <Close />
          </button>
        </div>
        <button class="button wide" type="button" onClick={() => (newChat(), shut())}>
          <Plus /> New chat
        </button>
        <nav class="grow" aria-label="History">
          <History />
        </nav>
        <nav aria-label="Views">
          <To to="chat" label="Chat" Icon={Chat} />
          <To to="engine" label="Engine" Icon={Engine} />
        </nav>
      </aside>
    </>
  );
}

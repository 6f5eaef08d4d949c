/** Beside everything: new chat, the conversations, and the way to the engine. A drawer on phones. */

import { signal } from "@preact/signals";
import { HistoryList, Transfer } from "../chat/history-list.tsx";
import { isHelpOpen } from "../chat/shortcuts.tsx";
import { newChat } from "../chat/store.ts";
import { Chat, Close, Engine, Keyboard, Mark, Plus } from "../ui/icons.tsx";
import { hrefOf, route, type Route } from "./route.ts";

export const isSidebarOpen = signal(false);

const shut = () => (isSidebarOpen.value = false);

const toChat = () => {
  location.hash = hrefOf("chat");
  shut();
};

function To({ to, label, Icon }: { to: Route; label: string; Icon: () => preact.JSX.Element }) {
  return (
    <a class="side-link" href={hrefOf(to)} aria-current={route.value === to ? "page" : undefined} onClick={shut}>
      <Icon /> {label}
    </a>
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
        <button class="button wide" type="button" onClick={() => (newChat(), toChat())}>
          <Plus /> New chat
        </button>
        <nav class="grow" aria-label="History">
          <HistoryList onOpen={toChat} />
        </nav>
        <Transfer />
        <nav aria-label="Views">
          <To to="chat" label="Chat" Icon={Chat} />
          <To to="engine" label="Engine" Icon={Engine} />
          <button class="side-link" type="button" aria-haspopup="dialog" onClick={() => ((isHelpOpen.value = true), shut())}>
            <Keyboard /> Keyboard shortcuts
          </button>
        </nav>
      </aside>
    </>
  );
}

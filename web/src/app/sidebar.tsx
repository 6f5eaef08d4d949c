/** The sidebar: new chat, the conversations, a link to the engine view. A drawer on phones. */

import { signal } from "@preact/signals";
import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { HistoryList, Transfer } from "../chat/history/list.tsx";
import { isHelpOpen } from "../chat/shortcuts.tsx";
import { newChat } from "../chat/conversation/store.ts";
import { Chat, Close, Engine, Keyboard, Mark, Plus } from "../ui/icons.tsx";
import { hrefOf, route, type Route } from "./route.ts";

export const isSidebarOpen = signal(false);

const shut = () => (isSidebarOpen.value = false);

// on a wide screen the sidebar is not a drawer and must make nothing inert
matchMedia("(max-width: 800px)").addEventListener("change", shut);

function To({ to, label, Icon }: { to: Route; label: string; Icon: () => preact.JSX.Element }) {
  return (
    <a class="side-link" href={hrefOf(to)} aria-current={route.value === to ? "page" : undefined} onClick={shut}>
      <Icon /> {label}
    </a>
  );
}

/** While the drawer is open the focus is in it and the page behind it is inert (app.tsx). */
function useFocusWithin(box: RefObject<HTMLElement | null>, isOpen: boolean): void {
  useEffect(() => {
    if (!isOpen) return;
    box.current?.querySelector<HTMLElement>(".phone")?.focus();
    return () => {
      if (box.current?.contains(document.activeElement)) document.getElementById("menu")?.focus();
    };
  }, [isOpen]);
}

export function Sidebar() {
  const box = useRef<HTMLElement>(null);
  const isOpen = isSidebarOpen.value;
  useFocusWithin(box, isOpen);
  return (
    <>
      {isOpen && <div class="scrim" onClick={shut} />}
      <aside ref={box} class="sidebar" data-open={isOpen} aria-label="Conversations">
        <div class="brand">
          <Mark />
          <span>Streamer</span>
          <button class="button icon-only phone" type="button" aria-label="Close menu" onClick={shut}>
            <Close />
          </button>
        </div>
        <button class="button wide" type="button" onClick={() => (newChat(), shut())}>
          <Plus /> New chat
        </button>
        <nav class="grow" aria-label="History">
          <HistoryList onOpen={shut} />
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

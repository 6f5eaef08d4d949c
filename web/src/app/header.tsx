/** The header: the model, the state of the connection, theme and settings. */

import type { ConnectionState } from "../client/index.ts";
import { newChat } from "../chat/conversation/store.ts";
import { isSettingsOpen } from "../chat/composer/settings.tsx";
import { Key, Menu, Moon, Plus, Sliders, Sun } from "../ui/icons.tsx";
import { connection, session } from "./connection.ts";
import { askForKey } from "./key-dialog.tsx";
import { isDark, toggleTheme } from "./preferences.ts";
import { isSidebarOpen } from "./sidebar.tsx";

function Badge({ state }: { state: ConnectionState }) {
  const detail = state.name === "reconnecting" || state.name === "offline" ? state.reason : "";
  const over = state.name === "connected" && state.transport === "sse" ? "over SSE, because no WebSocket could be opened" : "";
  const text = state.name === "idle" || state.name === "closed" ? "connecting" : state.name;
  return (
    <div id="badge" class="badge" role="status" data-state={state.name} title={detail || over || undefined}>
      <span>{text}</span>
    </div>
  );
}

export function Header() {
  const state = connection.value;
  const model = session.value;
  return (
    <header class="header">
      <button id="menu" class="button icon-only phone" type="button" aria-label="Menu" aria-expanded={isSidebarOpen.value} onClick={() => (isSidebarOpen.value = true)}>
        <Menu />
      </button>
      <div class="model" title={model ? `${model.context_length.toLocaleString()} tokens of context` : undefined}>
        <span class="model-name">{model?.model ?? "Streamer"}</span>
        {model && <span class="model-context">{model.context_length.toLocaleString()} tokens of context</span>}
      </div>
      {state.name === "locked" ? (
        <button class="button" type="button" aria-haspopup="dialog" onClick={askForKey}>
          <Key /> Enter key
        </button>
      ) : (
        <Badge state={state} />
      )}
      <button class="button icon-only" type="button" aria-label={isDark.value ? "Use the light theme" : "Use the dark theme"} onClick={toggleTheme}>
        {isDark.value ? <Sun /> : <Moon />}
      </button>
      <button class="button icon-only" type="button" aria-label="Settings" aria-haspopup="dialog" onClick={() => (isSettingsOpen.value = true)}>
        <Sliders />
      </button>
      <button class="button icon-only phone" type="button" aria-label="New chat" onClick={newChat}>
        <Plus />
      </button>
    </header>
  );
}

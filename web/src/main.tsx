/** Starts the page: styles, the connection, the frame. */

import { render } from "preact";
import { App } from "./app/app.tsx";
import { start } from "./app/connection.ts";
import { begin } from "./chat/history/history.ts";
import "./ui/theme.css";
import "./ui/base.css";
import "./app/frame.css";
import "./chat/chat.css";
import "./chat/parts.css";

const root = document.getElementById("app");
if (root) render(<App />, root);
start();
void begin();

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ago, useNow } from "./format";
import { ask, useWorld, world } from "./live";
import { Nodes } from "./nodes";
import { Overview } from "./overview";
import { Ranges } from "./ranges";
import { go, href, Link, usePlace } from "./router";
import { ServicePage } from "./service";
import { SignIn } from "./signin";
import "./style.css";

type Theme = "auto" | "light" | "dark";

function useTheme(): [Theme, (t: Theme) => void] {
  const [theme, set] = useState<Theme>(() => (localStorage.getItem("portal-theme") as Theme | null) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset["theme"] = theme;
    localStorage.setItem("portal-theme", theme);
  }, [theme]);
  return [theme, set];
}

const symbols: Record<Theme, string> = { auto: "◐", light: "☀", dark: "☾" };

function Header({ user, signOut, here }: { user: string; signOut: () => void; here: string }) {
  const [theme, setTheme] = useTheme();
  const next: Theme = theme === "auto" ? "light" : theme === "light" ? "dark" : "auto";
  const pages: [string, string][] = [
    ["", "Services"],
    ["nodes", "Nodes"],
    ["ranges", "Addresses"],
  ];
  return (
    <header class="top">
      <a class="skip" href="#content">
        Skip to the content
      </a>
      <Link to={href([])} class="brand" aria-label="Portal console, all Services">
        <img src="/console/icon.svg" alt="" width="26" height="26" />
        <span>Portal</span>
      </Link>
      <nav aria-label="Pages">
        {pages.map(([path, name]) => (
          <Link key={path} to={href(path ? [path] : [])} aria-current={here === path ? "page" : undefined}>
            {name}
          </Link>
        ))}
      </nav>
      <Live />
      <button class="plain" onClick={() => setTheme(next)} title={`Colours: ${theme}`} aria-label={`Colours: ${theme}. Change to ${next}.`}>
        {symbols[theme]}
      </button>
      <span class="user" title={user}>
        {user}
      </span>
      <button class="plain" onClick={signOut}>
        Sign out
      </button>
    </header>
  );
}

/** Live says whether what is shown is what is. */
function Live() {
  useWorld();
  const away = world.status?.awaySince;
  const state = world.connection === "lost" ? "lost" : away ? "away" : world.status?.synced ? "live" : "connecting";
  const words = { lost: "Reconnecting", away: "API server away", live: "Live", connecting: "Loading" };
  return (
    <span class={"conn " + state} role="status">
      <i aria-hidden="true" /> {words[state]}
    </span>
  );
}

/** Banner says what keeps the page from being up to date, or complete. */
function Banner() {
  useWorld();
  const now = useNow(1000);
  if (world.connection === "lost")
    return (
      <p class="banner bad" role="alert">
        The console's server does not answer. What you see is what was last known; it goes on by itself.
      </p>
    );
  if (world.status?.awaySince)
    return (
      <p class="banner bad" role="alert">
        The API server has not answered for {ago(world.status.awaySince, now)}. What you see is what was last known; it goes on by itself.
      </p>
    );
  return null;
}

function App() {
  const [user, setUser] = useState<string>();
  const [reason, setReason] = useState("");
  const [checked, setChecked] = useState(false);
  const place = usePlace();

  useEffect(() => {
    // A code in the address signs in by itself, also in place of somebody else.
    if (new URLSearchParams(location.hash.slice(1)).has("code")) return setChecked(true);
    ask<{ user: string }>("GET", "session").then(
      (answer) => {
        if (answer.user) setUser(answer.user);
        setChecked(true);
      },
      () => setChecked(true),
    );
  }, []);
  const leave = (why: string) => {
    world.stop();
    setReason(why);
    setUser(undefined);
  };
  useEffect(() => {
    if (user === undefined) return;
    world.start(() => leave("The session has ended, or the server was restarted: sign in again."));
    return world.listen(() => {
      if (world.status?.signedOut) leave("The API server does not accept your credentials any more: sign in again.");
    });
  }, [user]);

  if (!checked) return null;
  if (user === undefined) return <SignIn reason={reason} done={setUser} />;
  const [page = "", ...rest] = place.path;
  const signOut = () => {
    void ask("POST", "signout").finally(() => leave(""));
  };
  let content = <NotFound />;
  if (page === "" || (page === "services" && rest.length === 0)) content = <Overview place={place} />;
  else if (page === "services" && rest.length === 2) content = <ServicePage key={rest.join("/")} namespace={rest[0]!} name={rest[1]!} place={place} />;
  else if (page === "nodes") content = <Nodes />;
  else if (page === "ranges") content = <Ranges path={rest} />;
  return (
    <>
      <Header user={user} signOut={signOut} here={page === "services" ? "" : page} />
      <Banner />
      <main id="content" tabIndex={-1}>
        {content}
      </main>
    </>
  );
}

function NotFound() {
  useEffect(() => void (document.title = "Not found · Portal"), []);
  return (
    <section class="empty">
      <h1>There is no such page</h1>
      <p>
        <button class="primary" onClick={() => go(href([]))}>
          All Services
        </button>
      </p>
    </section>
  );
}

render(<App />, document.getElementById("app")!);

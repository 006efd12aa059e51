// The stream of the gateway, and what is said while there is none.
const SILENT_MS = 16000; // the gateway says something every five seconds
const KEY = "kvscout token";
const handlers = {
  history: showHistory,
  state(state) {
    span = state.span;
    say($("about"), `gateway ${state.gateway} · ${state.version}`);
    $("board").hidden = false;
    troubles = state.troubles;
    showDoctor();
    showHeadline(state);
    showTry(state);
    showShadow(state.shadow);
    showCharts();
    showWorkers(state.workers);
    showDecisions(state.decisions);
    showServices(state.services);
  },
  failures: showFailures,
  ladders: showLadders,
  prefixes: showPrefixes,
  requests: showTimelines,
  doctor: hearDoctor,
};
let lastData = null;
function connection(state, text, reason = "") {
  const node = $("connection");
  if (node.dataset.state !== state) announce(state === "live" ? "connected, live" : `${text} ${reason}`);
  node.dataset.state = state;
  say(node, text);
  $("board").classList.toggle("stale", state === "lost");
  if (lostText !== reason) {
    lostText = reason;
    showDoctor();
  }
}
function token() {
  return sessionStorage.getItem(KEY);
}
function askForToken(why) {
  sessionStorage.removeItem(KEY);
  $("board").hidden = $("sign-out").hidden = true;
  $("sign-in").hidden = false;
  say($("sign-in-why"), why);
  $("sign-in-clear").hidden = isSecureContext;
  connection("waiting", "a token is needed");
  $("token").focus();
  return new Promise((resolve) => {
    $("sign-in").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("token").value);
      $("token").value = "";
      $("sign-in").hidden = true;
      resolve();
    };
  });
}
let stop = null;
$("sign-out").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  stop?.abort();
});
class Refused extends Error {}
async function watch() {
  stop = new AbortController();
  let timer;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), SILENT_MS);
  };
  try {
    alive();
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const response = await fetch("dashboard/events", { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: stop.signal });
    if (!response.ok) {
      const text = await response.json().then((answer) => answer.error.message, () => `status ${response.status}`);
      if (response.status === 401 || (response.status === 403 && token())) throw new Refused(text);
      throw new Error(text);
    }
    $("sign-out").hidden = !token();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the gateway has ended the stream");
      alive();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const text of events) {
        const fields = Object.fromEntries(text.split("\n").map((line) => line.split(/: (.*)/s)));
        if (!fields.event) continue;
        handlers[fields.event]?.(JSON.parse(fields.data));
        lastData = new Date();
        connection("live", `● live ${clock.format(lastData)}`);
      }
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}
async function run() {
  for (let pause = 1000; ; ) {
    const began = performance.now();
    try {
      await watch();
    } catch (error) {
      if (error instanceof Refused) {
        await askForToken(error.message);
        continue;
      }
      const reason = error.name === "AbortError" ? "it is silent" : error instanceof TypeError ? "it cannot be reached" : error.message;
      const since = lastData ? `No data since ${clock.format(lastData)}` : "No data yet";
      connection("lost", `✕ ${since.toLowerCase()}`, `${since} from this gateway: ${reason}. Trying again.`);
    }
    pause = performance.now() - began > 10000 ? 1000 : Math.min(2 * pause, 5000);
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
  }
}
run();

// What a page does beyond being read: opens what is folded, and follows a run that goes on. Every answer of the server
// is escaped there; nothing here makes markup of text.
"use strict";
(() => {
  const LOOK_MS = 2000;
  const content = document.getElementById("content");
  const news = document.getElementById("news");

  const fetched = async (address) => {
    const answer = await fetch(address, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
    return answer;
  };

  const pieces = async (address) => {
    const text = await (await fetched(address)).text();
    return [...new DOMParser().parseFromString(text, "text/html").body.childNodes];
  };

  const told = (error) => {
    const line = document.createElement("p");
    line.className = "failure";
    line.textContent = String(error);
    return line;
  };

  // A fold asks for its inside when it is opened for the first time. (The event does not bubble: hence the capture.)
  document.addEventListener("toggle", async (event) => {
    const fold = event.target;
    if (!(fold instanceof HTMLDetailsElement) || !fold.open || !fold.dataset.src || fold.dataset.asked) return;
    fold.dataset.asked = "1";
    const wait = fold.querySelector(":scope > .wait");
    try {
      wait.replaceWith(...(await pieces(fold.dataset.src)));
    } catch (error) {
      wait.replaceWith(told(error));
    }
  }, true);

  document.addEventListener("click", async (event) => {
    const link = event.target instanceof Element ? event.target.closest(".more[data-src], .rest") : null;
    if (!link) return;
    event.preventDefault();
    try {
      await (link.classList.contains("rest") ? rest(link) : more(link));
    } catch (error) {
      link.after(told(error));
    }
  });

  const more = async (link) => {
    const whole = link.dataset.whole ? link.closest(".inside") : null;
    const found = await pieces(link.dataset.src);
    if (whole) whole.replaceWith(...found);
    else link.parentElement.replaceWith(...found);
  };

  const rest = async (button) => {
    const answer = await (await fetched(`${button.dataset.src}?offset=${button.dataset.offset}`)).json();
    button.previousElementSibling.append(answer.text);
    button.dataset.offset = answer.end;
    if (answer.end >= answer.total) button.remove();
  };

  // A page that is live is replaced when something was written, unless a person is in the middle of it.
  const isBusy = () =>
    content.querySelector("details[open]") || content.contains(document.activeElement) || !getSelection().isCollapsed;

  const follow = () => {
    let seen = null;
    const look = async () => {
      try {
        if (!document.hidden) {
          const { stamp } = await (await fetched("/api/stamp")).json();
          if (seen !== null && stamp !== seen) {
            if (isBusy()) {
              news.textContent = "there is news: reload to see it";
              return;
            }
            const address = new URL(location.href);
            address.searchParams.set("fragment", "1");
            content.replaceChildren(...(await pieces(address)));
          }
          seen = stamp;
          news.textContent = "";
        }
      } catch (error) {
        news.textContent = "not reachable; trying again";
      } finally {
        setTimeout(look, LOOK_MS);
      }
    };
    look();
  };

  if (content.dataset.live) follow();
})();

"""Modules that act in an environment while they train: every further call of training_step shows."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from contract.models import BATCH, Net, adam, sgd
from contract.registry import fits
from contract.traits import MANUAL

ACTIONS = 2
STATE = 3
EACH_PLAYS = "each rank plays in an environment of its own"


class Environment:
    """A walk that ends when it leaves the middle; its state is no tensor of the module."""

    def __init__(self) -> None:
        self.dice = random.Random(5)
        self.steps = 0
        self.reset()

    def reset(self) -> list[float]:
        self.place = [self.dice.uniform(-1, 1) for _ in range(STATE)]
        return self.place

    def step(self, action: int) -> tuple[list[float], float, bool]:
        self.steps += 1
        push = 0.3 if action else -0.3
        self.place = [0.9 * value + push + self.dice.gauss(0, 0.1) for value in self.place]
        distance = sum(abs(value) for value in self.place)
        return self.place, 1 - distance / STATE, distance > 2 * STATE


class Experience(NamedTuple):
    state: list[float]
    action: int
    reward: float
    done: bool
    following: list[float]


class Remembered(IterableDataset[Any]):
    """Samples from what was seen so far, which grows while it is read."""

    def __init__(self, memory: deque[Experience], samples: int) -> None:
        self.memory, self.samples = memory, samples

    def __iter__(self) -> Iterator[Any]:
        for one in random.choices(list(self.memory), k=self.samples):
            yield (torch.tensor(one.state), one.action, torch.tensor(one.reward), one.done, torch.tensor(one.following))


class ValueLearner(Net):
    """Deep Q-learning: each training step plays on, remembers, and copies its weights to a target from time to time."""

    serves_data = True

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(STATE, 8), nn.ReLU(), nn.Linear(8, ACTIONS)))
        self.target = nn.Sequential(nn.Linear(STATE, 8), nn.ReLU(), nn.Linear(8, ACTIONS))
        self.environment, self.memory = Environment(), deque[Experience](maxlen=64)
        self.reward = 0.0
        for _ in range(16):
            self.play(epsilon=1.0)

    def play(self, epsilon: float) -> bool:
        state = list(self.environment.place)
        if random.random() < epsilon:
            action = random.randrange(ACTIONS)
        else:
            action = int(self.net(torch.tensor([state])).argmax())
        following, reward, done = self.environment.step(action)
        self.memory.append(Experience(state, action, reward, done, list(following)))
        self.reward += reward
        if done:
            self.environment.reset()
        return done

    def loss(self, batch: Any) -> Tensor:
        states, actions, rewards, done, following = batch
        values = self.net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            later = self.target(following).max(1).values.masked_fill(done, 0.0)
        return mse_loss(values, rewards + 0.9 * later)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.play(epsilon=max(0.1, 1 - 0.1 * self.global_step))
        loss = self.loss(batch)
        if self.global_step % 4 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.note(loss=loss, played=torch.tensor(self.environment.steps), reward=torch.tensor(self.reward))
        self.log_dict({"reward": self.reward, "loss": loss})
        return loss

    def configure_optimizers(self) -> Any:
        return adam(self.net.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(Remembered(self.memory, 5 * BATCH), batch_size=BATCH)


fits(single=EACH_PLAYS, template_deep_q_learning=lambda bench: bench.fit(ValueLearner()))


class Played(IterableDataset[Any]):
    """What the policy does, as it is when a batch is asked for."""

    def __init__(self, learner: "PolicyLearner") -> None:
        self.learner = learner

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4 * BATCH):
            yield self.learner.play()


class PolicyLearner(Net):
    """Proximal policy optimization: an actor and a critic, each with its optimizer, stepped by hand."""

    serves_data = True

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(STATE, 8), nn.Tanh(), nn.Linear(8, ACTIONS)))
        self.critic = nn.Sequential(nn.Linear(STATE, 8), nn.ReLU(), nn.Linear(8, 1))
        self.automatic_optimization = False
        self.environment = Environment()

    @torch.no_grad()
    def play(self) -> Any:
        state = torch.tensor(self.environment.place)
        policy = torch.distributions.Categorical(logits=self.net(state))
        action = policy.sample()
        following, reward, done = self.environment.step(int(action))
        gained = reward + 0.9 * float(self.critic(torch.tensor(following))) - float(self.critic(state))
        if done:
            self.environment.reset()
        return state, action, policy.log_prob(action), torch.tensor(gained), torch.tensor(reward)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        states, actions, before, advantage, rewards = batch
        for_actor, for_critic = self.optimizers()
        ratio = (torch.distributions.Categorical(logits=self.net(states)).log_prob(actions) - before).exp()
        actor_loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        for_actor.zero_grad()
        self.manual_backward(actor_loss)
        for_actor.step()
        critic_loss = mse_loss(self.critic(states).squeeze(1), rewards)
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        self.trace.append([actor_loss.detach(), critic_loss.detach(), self.environment.steps])

    def configure_optimizers(self) -> Any:
        return [adam(self.net.parameters()), sgd(self.critic.parameters())], []

    def train_dataloader(self) -> Any:
        return DataLoader(Played(self), batch_size=BATCH)


fits(MANUAL, single=EACH_PLAYS, template_policy_optimization=lambda bench: bench.fit(PolicyLearner()))

# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimization on a small world, with minibatches from a DataLoader."""

import argparse

import torch
import torch.nn as nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset


class Chase:
    """Many agents on a line of 16 inputs each follow a target that moves."""

    def __init__(self, n_envs):
        self.n_envs = n_envs
        self.reset()

    def reset(self):
        self.position = torch.zeros(self.n_envs)
        self.target = torch.randn(self.n_envs)
        return self.observe()

    def observe(self):
        gap = self.target - self.position
        waves = torch.arange(1, 9) * gap.unsqueeze(1)
        return torch.cat([waves.sin(), waves.cos()], 1)

    def step(self, action):
        self.position = self.position + 0.3 * (action - 1)
        self.target = self.target + 0.1 * torch.randn(self.n_envs)
        reward = -(self.target - self.position).abs()
        return self.observe(), reward, torch.rand(self.n_envs) < 0.05


def layer_init(layer, std=2**0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(16, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(16, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, 3), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        logits = self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def collect(agent, env, obs, args):
    keep = []
    with torch.no_grad():
        for _ in range(args.num_steps):
            action, logprob, _, value = agent.get_action_and_value(obs)
            next_obs, reward, done = env.step(action)
            keep.append((obs, action, logprob, reward, done.to(reward.dtype), value.flatten()))
            obs = next_obs
        obs_, actions, logprobs, rewards, dones, values = map(torch.stack, zip(*keep, strict=True))
        advantages = torch.zeros_like(rewards)
        last, next_value = 0, agent.get_value(obs).flatten()
        for t in reversed(range(args.num_steps)):
            alive = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * alive - values[t]
            last = delta + args.gamma * args.gae_lambda * alive * last
            advantages[t] = last
            next_value = values[t]
        returns = advantages + values
    print(f"mean reward: {rewards.mean().item():.5f}")
    data = (obs_, actions, logprobs, advantages, returns, values)
    return obs, TensorDataset(*(each.flatten(0, 1) for each in data))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-envs", type=int, default=160)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--num-iterations", type=int, default=2)
    parser.add_argument("--minibatch-size", type=int, default=1400)
    parser.add_argument("--update-epochs", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--target-kl", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = Chase(args.num_envs)
    agent = Agent(args.hidden).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    obs = env.reset()
    for iteration in range(1, args.num_iterations + 1):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / 4)
        obs, rollout = collect(agent, env, obs, args)
        loader = DataLoader(rollout, batch_size=args.minibatch_size, shuffle=True)
        clipfracs = []
        for _ in range(args.update_epochs):
            for batch in loader:
                mb_obs, actions, logprobs, advantages, returns, values = (
                    each.to(device) for each in batch
                )
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, actions)
                logratio = newlogprob - logprobs
                ratio = logratio.exp()
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipped = (ratio - 1.0).abs() > args.clip_coef
                    clipfracs += [clipped.double().mean().item()]
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                pg_loss1 = -advantages * ratio
                pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                newvalue = newvalue.view(-1)
                v_clipped = values + torch.clamp(newvalue - values, -0.2, 0.2)
                v_loss_unclipped = (newvalue - returns) ** 2
                v_loss = 0.5 * torch.max(v_loss_unclipped, (v_clipped - returns) ** 2).mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if approx_kl > args.target_kl:
                break
        explained = 1 - (returns - values).var() / returns.var()
        print(
            f"policy {pg_loss.item():.6f} value {v_loss.item():.6f} "
            f"entropy {entropy_loss.item():.6f} kl {approx_kl.item():.6f} "
            f"old kl {old_approx_kl.item():.6f} clipped {sum(clipfracs) / len(clipfracs):.4f} "
            f"explained {explained.item():.5f}"
        )


if __name__ == "__main__":
    main()

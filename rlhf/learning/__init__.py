"""What a step does with its samples: advantages, the updates of actor and critic, the reference policy."""

"""What tests share: worlds, peers, servers, relays and builders."""

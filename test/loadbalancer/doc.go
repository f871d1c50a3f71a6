// Package loadbalancer tests the load balancer addresses of Services with real kube-proxies. Two Nodes and a client run in
// separate network namespaces. The tests require root; run them with `make e2e`.
package loadbalancer

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// restartDelay is how long Talos waits before it restarts a service.
	restartDelay = 5 * time.Second

	// recoveryTimeout is far longer than any recovery takes.
	recoveryTimeout = 5 * time.Minute

	// unmanaged is a Node that does not run Talos.
	unmanaged = "unmanaged"

	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
		{"level": "Metadata", "verbs": ["create", "update", "patch", "delete"],
		 "resources": [{"resources": ["nodes", "nodes/status"]}, {"group": "certificates.k8s.io"}]},
		{"level": "Metadata", "verbs": ["list", "watch"], "resources": [{"resources": ["nodes"]}]},
		{"level": "None"}]}`
)

// trial is a bed on which talos-ccm runs with all of its controllers, under an auditor.
type trial struct {
	*bed
	*auditor

	folder     string
	executable string
	managed    []Machine // whose Nodes are registered
	spare      []Machine
	leader     *service
	public     netip.Addr // last one that a machine got
}

// newTrial starts talos-ccm and waits until the Nodes of all machines but the spare ones are initialized.
func newTrial(ctx context.Context, executable string, machines, spare int) (t *trial, err error) {
	t = &trial{executable: executable, public: publicAddresses.Addr()}

	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()

	if t.folder, err = os.MkdirTemp("", "talos-ccm-trial-"); err != nil {
		return t, err
	}

	policy := filepath.Join(t.folder, "policy.json")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return t, err
	}

	t.bed, err = newBed(ctx, machines+spare, kube.Options{
		APIServerFlags: []string{"--audit-policy-file=" + policy, "--audit-log-path=" + t.auditLog(), "--audit-log-mode=blocking"},
	})
	if err != nil {
		t.bed = nil // closed

		return t, err
	}

	t.managed, t.spare = t.machines[:machines], t.machines[machines:]
	t.auditor = newAuditor(t.machines)

	if _, err := t.factory.Core().V1().Nodes().Informer().AddEventHandler(t.handler()); err != nil {
		return t, err
	}

	if t.leader, err = t.startService(0); err != nil {
		return t, err
	}

	if _, err := t.cluster.RegisterNode(ctx, kube.NodeSpec{Name: unmanaged, OSImage: "Other", NodeIPs: []netip.Addr{t.public}}); err != nil {
		return t, err
	}

	if err := t.register(ctx, t.managed); err != nil {
		return t, err
	}

	_, err = t.recover(ctx, t.managed)

	return t, err
}

func (t *trial) auditLog() string { return filepath.Join(t.folder, "audit.log") }

func (t *trial) close() error {
	var errs []error

	if t.leader != nil {
		errs = append(errs, t.leader.stop())
	}

	if t.bed != nil {
		errs = append(errs, t.bed.close())
	}

	return errors.Join(append(errs, os.RemoveAll(t.folder))...)
}

// order executes an action on machines.
func (t *trial) order(action string, machines []Machine) error {
	_, err := t.do(Order{Action: action}, machines)

	return err
}

func (t *trial) setKubeconfig(kubeconfig []byte, machines []Machine) error {
	_, err := t.do(Order{Action: "set kubeconfig", Kubeconfig: kubeconfig}, machines)

	return err
}

// change gives each of some machines another public address.
func (t *trial) change(machines []Machine) error {
	order := Order{Action: "set public address", Public: map[string]netip.Addr{}}

	for _, m := range machines {
		t.public = t.public.Next()
		order.Public[m.Nodename] = t.public
		t.allow(m.Nodename, t.public)
	}

	_, err := t.do(order, machines)

	return err
}

// recreateNode replaces the Node of a machine.
func (t *trial) recreateNode(ctx context.Context, m Machine) error {
	if err := t.client.CoreV1().Nodes().Delete(ctx, m.Nodename, metav1.DeleteOptions{}); err != nil {
		return err
	}

	return t.register(ctx, []Machine{m})
}

// recover waits until the Nodes of machines are up to date, and returns how long that took. It lists Nodes: after an
// outage, the auditor's informer is late, and recover waits for it, too.
func (t *trial) recover(ctx context.Context, machines []Machine) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, recoveryTimeout)
	defer cancel()

	start := time.Now()
	nodes := map[string]*corev1.Node{}

	err = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		list, err := t.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return false, nil //nolint:nilerr // until the API server serves again
		}

		clear(nodes)

		for i := range list.Items {
			nodes[list.Items[i].Name] = &list.Items[i]
		}

		return len(t.outdated(machines, nodes)) == 0, nil
	})
	took = time.Since(start)

	if err == nil {
		err = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(context.Context) (bool, error) {
			nodes = t.seen()

			return len(t.outdated(machines, nodes)) == 0, nil
		})
	}

	if err != nil {
		nodenames := t.outdated(machines, nodes)
		err = fmt.Errorf("wait until Nodes are up to date: %w; %d are not: %v", err, len(nodenames), nodenames[:min(10, len(nodenames))])
	}

	return took, err
}

// service is talos-ccm as a service that Talos restarts.
type service struct {
	ended chan error

	mu       sync.Mutex
	process  *running
	starts   int
	stopping bool
}

// startService starts talos-ccm with pod CIDRs on a control-plane machine.
func (t *trial) startService(machine int) (*service, error) {
	s := &service{ended: make(chan error, 1)}

	start := func() (started bool, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()

		if s.stopping {
			return false, nil
		}

		process, err := startProduct(t.bed, t.executable, machine, allocating("*,nodeipam")...)
		if err != nil {
			return false, err
		}

		s.process = process
		s.starts++

		return true, nil
	}
	if _, err := start(); err != nil {
		return nil, err
	}

	go func() {
		for {
			process, _ := s.running()
			<-process.Done()
			time.Sleep(restartDelay)

			if started, err := start(); !started {
				s.ended <- err

				return
			}
		}
	}()

	return s, nil
}

func (s *service) running() (process *running, starts int) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.process, s.starts
}

// restart ends the process, which is then started again.
func (s *service) restart() error {
	process, _ := s.running()

	return process.stop(syscall.SIGTERM)
}

func (s *service) stop() error {
	s.mu.Lock()
	s.stopping = true
	process := s.process
	s.mu.Unlock()

	_ = process.stop(syscall.SIGTERM) // may have ended

	return <-s.ended
}

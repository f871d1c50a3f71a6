// Package simulation_test runs the node and IPAM controllers, and the lifecycle controller, through random histories of
// machines, Nodes, API requests and processes. A history depends on nothing but its seed.
package simulation_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

var (
	histories = flag.Uint64("histories", 20, "number of random histories")
	first     = flag.Uint64("seed", 0, "seed of the first history")
)

const (
	// length of a history, in moves.
	length = 400
	// leaseDuration is the time without a leader after a crash.
	leaseDuration = 15 * time.Second
)

// simulation is one history.
type simulation struct {
	*rand.Rand

	t        *testing.T
	server   *apiServer
	network  *controlplane.Value[*controlplane.Network]
	options  func() nodespec.Options
	workers  int
	machines map[string]*machineState // by the name of the Node at whose address they respond
	leader   *instance                // nil after a crash
	expiry   time.Time                // of the lease after a crash
	faults   bool                     // of requests and watches
	reliable string                   // the controller whose requests have no faults
	// controllers creates the controllers of an instance, and deleting is called before a controller deletes a Node.
	controllers func(*instance) []func(context.Context)
	deleting    func(name string)
	// checkWrite checks a write of another controller than the lifecycle controller.
	checkWrite func(c *call, before, after *corev1.Node)

	// mu is not held while time passes, and controllers run.
	mu       sync.Mutex
	calls    []*call
	released *call // in the current move
	moves    int

	began     time.Time
	trace     []string
	counts    map[string]int
	violation error
}

func TestControllers_RandomHistories(t *testing.T) {
	counts := map[string]int{}

	for seed := *first; seed < *first+*histories && !t.Failed(); seed++ {
		s := run(t, seed, (*simulation).play)
		s.report(t, seed)

		for what, n := range s.counts {
			counts[what] += n
		}
	}

	t.Logf("%d histories: %v", *histories, counts)

	for _, what := range []string{
		"instances", "crashes", "initialized", "podCIDRs", "conflicts", "refused", "lost", "abandoned", "late", "relists", "re-created", "conditions",
	} {
		if *histories >= 20 && counts[what] == 0 && !t.Failed() {
			t.Errorf("no history has %s", what)
		}
	}
}

func TestControllers_SameSeedSameHistory(t *testing.T) {
	for seed := range uint64(2) {
		require.Equal(t, run(t, seed, (*simulation).play).trace, run(t, seed, (*simulation).play).trace, "seed %d", seed)
	}
}

// report fails the test if an invariant was violated.
func (s *simulation) report(t *testing.T, seed uint64) {
	t.Helper()

	if s.violation != nil {
		t.Errorf("seed %d: %v\n%s", seed, s.violation, strings.Join(s.trace, "\n"))
	}
}

// run runs one history in its own bubble.
func run(t *testing.T, seed uint64, play func(*simulation)) (s *simulation) {
	t.Helper()

	fieldManagers()

	synctest.Test(t, func(t *testing.T) {
		s = &simulation{
			Rand: rand.New(rand.NewPCG(seed, 1)), t: t, server: &apiServer{nodes: map[string]*corev1.Node{}}, machines: map[string]*machineState{}, //nolint:gosec // reproducible
			began: time.Now(), counts: map[string]int{}, faults: true,
		}
		s.workers = []int{1, 2, len(names)}[s.IntN(3)]
		s.configure()
		s.network = s.readNetwork()
		s.controllers, s.checkWrite = s.nodeControllers, s.check
		s.mu.Lock()
		play(s)
		s.crash()
		s.pass(0)
	})

	return s
}

// play makes random moves, then ends all faults and expects that the controllers converge.
func (s *simulation) play() {
	for _, name := range names {
		s.machines[name] = s.newMachine(name)
		s.register(name)
	}

	s.lead()

	for ; s.moves < length && s.violation == nil; s.moves++ {
		s.move()
		s.pass(time.Duration(1 + s.IntN(5_000_000)))
	}

	s.drain() // or a Node gets the identity that a machine had before

	if s.violation == nil {
		s.heal()
		s.settle()
	}

	if s.violation == nil {
		s.checkConverged()
	}
}

// move makes one random move. All controllers wait when it begins.
func (s *simulation) move() {
	s.succeed()

	s.released = nil

	switch n := s.IntN(100); {
	case n < 50:
		s.proceed()
	case n < 65:
		s.deliver()
	case n < 80:
		s.observe(names[s.IntN(len(names))])
	case n < 86:
		s.changeMachine(names[s.IntN(len(names))])
	case n < 94:
		s.changeNode(names[s.IntN(len(names))])
	case n < 98:
		d := time.Duration(s.Int64N(int64(5 * time.Second)))
		if s.IntN(5) == 0 {
			d *= 10
		}

		s.note("sleep %s", d)
		s.pass(d)
	default:
		s.fail()
	}
}

// pass lets some time pass, waits until all controllers wait, and orders their calls.
func (s *simulation) pass(d time.Duration) {
	s.mu.Unlock()
	time.Sleep(d)
	synctest.Wait()
	s.mu.Lock()

	s.calls = slices.DeleteFunc(s.calls, func(c *call) bool {
		if c.abandoned {
			s.counts["abandoned"]++
		}

		return c.abandoned && (c.request == nil || c.answered)
	})

	// Calls of one move arrive in any order.
	slices.SortStableFunc(s.calls, func(a, b *call) int { return cmp.Or(a.arrived-b.arrived, strings.Compare(a.String(), b.String())) })
}

// proceed lets a random call continue.
func (s *simulation) proceed() {
	if len(s.calls) == 0 {
		return
	}

	c := s.calls[s.IntN(len(s.calls))]

	switch {
	case c.request == nil || c.answered:
		s.release(c)
	case s.fails(c) && s.IntN(8) == 0 && c.request.Method != http.MethodGet: // a failed list is retried at random times
		s.count("refused")
		s.refuse(c, []error{
			apierrors.NewInternalError(errors.New("no leader")), apierrors.NewForbidden(corev1.Resource("nodes"), c.name, errors.New("by a webhook")),
			apierrors.NewTooManyRequests("later", 0),
		}[s.IntN(3)])
	default:
		s.serve(c)

		if s.fails(c) && s.IntN(8) == 0 && c.request.Method != http.MethodGet {
			s.note("lose the reply")
			s.count("lost")

			c.response, c.err = nil, errLost
		}
	}
}

// fails reports whether a request may be refused or lose its reply.
func (s *simulation) fails(c *call) bool { return s.faults && c.controller != s.reliable }

// release lets a controller continue.
func (s *simulation) release(c *call) {
	s.note("continue %v", c)
	s.released = c
	s.calls = slices.DeleteFunc(s.calls, func(other *call) bool { return other == c })
	close(c.done)
}

// refuse answers a request with an error.
func (s *simulation) refuse(c *call, err error) {
	s.note("refuse %v: %v", c, err)
	c.answered = true
	c.respond(nil, err)
}

// serve lets the API server answer a request, and checks the result. A request may be served although the
// controller no longer waits for the reply, but not after its timeout.
func (s *simulation) serve(c *call) {
	if time.Now().After(c.deadline) {
		s.refuse(c, apierrors.NewTimeoutError("too late", 0))

		return
	}

	before := s.server.nodes[c.name]

	if s.deleting != nil && c.request.Method == http.MethodDelete && s.server.checkPreconditions(c.name, c.body) == nil {
		s.deleting(c.name)
	}

	obj, err := s.server.serve(c.request, c.body)
	if err != nil {
		if apierrors.IsConflict(err) {
			s.count("conflicts")
		}

		s.checkAttempt(c, before, err)
		s.refuse(c, err)

		return
	}

	s.note("serve %v %s", c, c.body)
	c.answered = true

	if c.abandoned {
		s.count("late")
	}

	c.respond(obj, nil)

	if after, isNode := obj.(*corev1.Node); isNode && c.controller != lifecycle.Alias {
		s.checkWrite(c, before, after)
	}
}

// deliver delivers an event to the cache or to a handler, or interrupts the watch, and reports whether there is an event.
func (s *simulation) deliver() bool {
	if s.leader == nil {
		return false
	}

	i := s.leader.informer
	pending := slices.DeleteFunc(slices.Clone(i.handlers), (*handler).idle)

	switch { // with faults, handlers fall behind the cache
	case len(pending) > 0 && (!s.faults && !i.behind() || s.IntN(2) == 0):
		h := pending[s.IntN(len(pending))]
		s.note("handler %d", slices.Index(i.handlers, h))
		h.handle()
	case i.behind() && s.faults && s.IntN(20) == 0:
		s.count("relists")
		i.relist(i.version + 1 + s.IntN(len(s.server.history)-i.version))
		s.note("relist to %d", i.version)
	case i.behind():
		i.next()
		s.note("watch %d", i.version)
	default:
		return false
	}

	return true
}

// fail crashes the leader, or lets it hand over.
func (s *simulation) fail() {
	switch {
	case s.leader == nil:
	case s.IntN(2) == 0:
		s.crash()
	case !s.leader.stopping:
		s.note("stop")
		s.leader.stopping = true
		s.leader.cancel()
	}
}

// crash ends the leader. Its requests may still be served.
func (s *simulation) crash() {
	if s.leader == nil {
		return
	}

	s.note("crash")
	s.count("crashes")
	close(s.leader.crashed)
	s.leader.cancel()
	s.leader, s.expiry = nil, time.Now().Add(leaseDuration)
}

// succeed starts the next leader if the lease is free.
func (s *simulation) succeed() {
	if s.leader != nil && s.leader.stopping {
		select {
		case <-s.leader.stopped:
			s.lead()
		default:
		}
	}

	if s.leader == nil && time.Now().After(s.expiry) {
		s.lead()
	}
}

// settle processes everything that is pending for several minutes. In the last rounds, controllers must write nothing.
func (s *simulation) settle() {
	const rounds, quiet = 20, 5

	for round := range rounds {
		s.drain()
		before := len(s.server.history)

		s.pass(31 * time.Second) // never in step with intervals of 30 s

		if written := slices.ContainsFunc(s.calls, func(c *call) bool { return c.request != nil && c.request.Method == http.MethodPatch }); round > rounds-quiet &&
			(written || len(s.server.history) != before) {
			s.violate("the controllers do not stop writing: %v", s.calls)
		}
	}

	if len(s.server.nodes) != len(names)-excess {
		s.violate("there are %d nodes", len(s.server.nodes))
	}
}

// drain processes everything that is pending, without faults.
func (s *simulation) drain() {
	s.faults = false
	defer func() { s.faults = true }()

	for range 10_000 {
		s.pass(0)
		s.succeed()
		s.released = nil

		switch {
		case len(s.calls) > 0 && s.IntN(4) > 0:
			s.proceed()
		case s.deliver() || len(s.calls) > 0:
		case s.leader == nil || !slices.ContainsFunc(names, s.observe):
			return
		}

		s.moves++
	}

	s.violate("the controllers do not become idle: %v", s.calls)
}

// readNetwork returns the facts about a control plane without machines and without an allocator.
func (s *simulation) readNetwork() *controlplane.Value[*controlplane.Network] {
	ctx, cancel := context.WithCancel(klog.NewContext(s.t.Context(), klog.Logger{})) // which discards
	client := &fake.Clientset{}
	client.AddReactor("*", "*", func(kubetesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewNotFound(corev1.Resource("any"), "")
	})

	reader := controlplane.New(controlplane.Config{
		Kubernetes: &rest.Config{Host: "http://api-server"}, Client: client, Nodes: newInformer(s.server, 0).nodes(nil), Machines: inventory.New(time.Now),
		Hosted: &csrpolicy.ClusterSubjects{}, Clock: clock.RealClock{},
	})
	reader.Network().Subscribe(cancel)
	reader.Run(ctx)

	return reader.Network()
}

func (s *simulation) count(what string) int {
	s.counts[what]++

	return s.counts[what]
}

func (s *simulation) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf("%d %s ", s.moves, time.Since(s.began))+fmt.Sprintf(format, args...))
}

func (s *simulation) violate(format string, args ...any) {
	if s.violation == nil {
		s.violation = fmt.Errorf(format, args...)
	}
}

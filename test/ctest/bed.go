package ctest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// Bed is the test environment that the tests of a package share.
type Bed struct {
	Kube *kube.Cluster
	// Client has administrator privileges.
	Client kubernetes.Interface
	Talos  *talostest.Cluster
}

// sharedBedParallelism is the number of parallel tests that share a bed.
const sharedBedParallelism = 16

// Main is for TestMain: it starts a control plane and a Talos cluster, calls setup, if any, runs the tests, calls what
// setup has returned, stops both clusters, and exits.
func (b *Bed) Main(m *testing.M, options kube.Options, setup func() (stop func(), err error)) {
	runAndExit(m, []*Bed{b}, sharedBedParallelism, options, setup)
}

func runAndExit(m *testing.M, beds []*Bed, parallel int, options kube.Options, setup func() (stop func(), err error)) {
	// The tests mostly wait. The flag -parallel still overrides this.
	if err := flag.Set("test.parallel", strconv.Itoa(parallel)); err != nil {
		panic(err)
	}

	code, err := run(m, beds, options, setup)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func run(m *testing.M, beds []*Bed, options kube.Options, setup func() (stop func(), err error)) (code int, err error) {
	// Not in parallel: the first start of a new version builds the components.
	for _, b := range beds {
		defer func() { err = errors.Join(err, b.stop()) }()

		if err := b.start(options); err != nil {
			return 1, err
		}
	}

	if setup != nil {
		stop, err := setup()
		if err != nil {
			return 1, err
		}

		defer stop()
	}

	return m.Run(), nil
}

func (b *Bed) start(options kube.Options) (err error) {
	options.Progress = os.Stderr

	if b.Kube, err = kube.Start(context.Background(), options); err != nil {
		return err
	}

	if b.Client, err = kubernetes.NewForConfig(b.Kube.Config()); err != nil {
		return err
	}

	b.Talos, err = talostest.New(talostest.Options{})

	return err
}

func (b *Bed) stop() error {
	if b.Talos != nil {
		b.Talos.Close()
	}

	if b.Kube == nil {
		return nil
	}

	return b.Kube.Stop()
}

// Suite is a test or benchmark with its bed. A test may replace fields of the bed. Packages embed it in a type with
// their own methods.
type Suite struct {
	testing.TB
	*Bed

	// Namespace limits the Events that are returned; empty means all.
	Namespace string
}

// NewSuite returns the suite of a test.
func (b *Bed) NewSuite(t testing.TB) Suite {
	t.Helper()

	own := *b

	return Suite{TB: t, Bed: &own}
}

// Start returns the suite of a test with its own bed, which stops when the test ends.
func Start(t testing.TB, options kube.Options) Suite {
	t.Helper()

	b := &Bed{}
	t.Cleanup(func() { assert.NoError(t, b.stop()) })
	require.NoError(t, b.start(options))

	return b.NewSuite(t)
}

// Pool has several beds, for tests that each need their own control plane: they stop its API server, or compete for a
// lease.
type Pool struct{ beds chan *Bed }

// Main is [Bed.Main] with beds for size parallel tests.
func (p *Pool) Main(m *testing.M, options kube.Options, size int, setup func() (stop func(), err error)) {
	p.beds = make(chan *Bed, size)

	var beds []*Bed

	for range size {
		b := &Bed{}
		beds = append(beds, b)
		p.beds <- b
	}

	runAndExit(m, beds, size, options, setup)
}

// NewSuite returns the suite of a parallel test, which has its own bed.
func (p *Pool) NewSuite(t *testing.T) Suite {
	t.Helper()
	t.Parallel()

	return p.NewSerialSuite(t)
}

// NewSerialSuite is NewSuite for a test that is not parallel, because it changes the environment or reads metrics.
func (p *Pool) NewSerialSuite(t *testing.T) Suite {
	t.Helper()

	b := <-p.beds
	t.Cleanup(func() { p.beds <- b })

	var err error

	// The test before may have changed the certificates.
	b.Client, err = kubernetes.NewForConfig(b.Kube.Config())
	require.NoError(t, err)

	return b.NewSuite(t)
}

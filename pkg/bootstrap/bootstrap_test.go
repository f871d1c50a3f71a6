package bootstrap_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// anotherAdmin returns a new admin kubeconfig for the same API server. Talos issues one every six months.
func anotherAdmin(bed ctest.Suite) []byte {
	bed.Helper()

	config, err := bed.Kube.UserConfig("talos:admin", "system:masters")
	require.NoError(bed, err)

	return kube.Kubeconfig(config)
}

func TestBootstrap_WritesPrivateFiles(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})

	assert.Equal(t, []string{"kubeconfig", "token"}, slices.Sorted(maps.Keys(s.files())))

	for name := range s.files() {
		info, err := os.Stat(filepath.Join(s.dir, name))
		require.NoError(t, err)

		assert.Equal(t, os.FileMode(0o600), info.Mode().Perm(), name)
	}

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	require.NoError(t, err)

	assert.Equal(t, bed.Kube.Endpoint(), config.Host)
	assert.Equal(t, bed.Kube.CA(), config.CAData)
	assert.Equal(t, filepath.Join(s.dir, "token"), config.BearerTokenFile)

	s.requireWorks()
}

func TestBootstrap_RequestsTokenForOneHour(t *testing.T) {
	// Not parallel, because it reads a metric of the process.
	bed := beds.NewSerialSuite(t)
	s := bootstrapped(bed, clock.RealClock{})

	parts := strings.Split(s.token(), ".")
	require.Len(t, parts, 3)

	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	require.NoError(t, err)

	var claims struct {
		Subject string `json:"sub"`
		Issued  int64  `json:"iat"`
		Expires int64  `json:"exp"`
	}

	require.NoError(t, json.Unmarshal(payload, &claims))

	assert.Equal(t, "system:serviceaccount:kube-system:talos-ccm", claims.Subject)
	assert.LessOrEqual(t, claims.Expires-claims.Issued, int64(3600))

	assert.Equal(t, float64(claims.Expires), ctest.Metrics(t)["talosccm_token_expiry_timestamp_seconds"])
}

func TestBootstrap_NeverWritesAdminCredentials(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})
	admin := bed.Kube.Config()

	for name, content := range s.files() {
		for what, secret := range map[string][]byte{"key": admin.KeyData, "certificate": admin.CertData} {
			assert.Empty(t, formIn(t, content, secret), "%s of the admin in %s", what, name)
		}
	}

	// Verify that the search works.
	assert.NotEmpty(t, formIn(t, bed.Kube.Kubeconfig(), admin.KeyData))
}

// formIn returns the encoding in which content contains a PEM document; empty if content does not contain it.
func formIn(t *testing.T, content, document []byte) string {
	t.Helper()

	block, _ := pem.Decode(document)
	require.NotNil(t, block)

	// The second line: the first is the same in many documents.
	line := bytes.Split(document, []byte("\n"))[2]

	for form, needle := range map[string][]byte{
		"PEM":           line,
		"DER":           block.Bytes[len(block.Bytes)/2:],
		"base64 of PEM": []byte(base64.StdEncoding.EncodeToString(document)),
		"base64 of DER": []byte(base64.StdEncoding.EncodeToString(block.Bytes)),
	} {
		if bytes.Contains(content, needle) {
			return form
		}
	}

	return ""
}

func TestBootstrap_WaitsForValidAdminKubeconfig(t *testing.T) {
	for name, content := range map[string]string{"missing": "", "not YAML": "\t", "not a kubeconfig": "a: b"} {
		t.Run(name, func(t *testing.T) {
			bed := beds.NewSuite(t)
			s := newSuite(bed, []byte(content))
			s.start(clock.RealClock{})
			ctest.Eventually(t, "admin kubeconfig was read twice", func() bool { return s.admin.reads.Load() >= 2 })
			require.Empty(t, s.files())

			began := time.Now()

			require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), bed.Kube.Kubeconfig()))
			s.awaitReady()
			t.Logf("credentials %s after the admin kubeconfig", time.Since(began).Round(10*time.Millisecond))
			s.requireWorks()
		})
	}
}

func TestBootstrap_WaitsForAPIServer(t *testing.T) {
	bed := beds.NewSuite(t)
	bed.Kube.StopAPIServer(t.Context())
	t.Cleanup(func() { require.NoError(t, bed.Kube.StartAPIServer(context.WithoutCancel(t.Context()))) })

	s := newSuite(bed, bed.Kube.Kubeconfig())
	s.start(clock.RealClock{})
	ctest.Eventually(t, "two attempts were made", func() bool { return s.admin.reads.Load() >= 2 })

	require.NoError(t, bed.Kube.StartAPIServer(t.Context()))

	began := time.Now()

	s.awaitReady()
	t.Logf("credentials %s after the API server", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks()
}

func TestBootstrap_RenewsEveryTenMinutes(t *testing.T) {
	bed := beds.NewSuite(t)
	clk := clocktesting.NewFakeClock(time.Now())
	s := bootstrapped(bed, clk)
	first := s.token()

	s.awaitRenewalTimer(clk)

	reads := s.admin.reads.Load()

	clk.Step(9 * time.Minute)

	assert.True(t, clk.HasWaiters(), "token was renewed before ten minutes")
	assert.Equal(t, reads, s.admin.reads.Load())

	clk.Step(time.Minute)
	s.awaitOther(first)
	s.requireWorks()
}

func TestBootstrap_LimitsRenewalsUnderClockSkew(t *testing.T) {
	bed := beds.NewSuite(t)
	clk := clocktesting.NewFakeClock(time.Now().Add(2 * time.Hour))
	s := bootstrapped(bed, clk)
	first := s.token()

	s.awaitRenewalTimer(clk)
	clk.Step(30 * time.Second)

	assert.True(t, clk.HasWaiters(), "token was renewed within 30 s")

	clk.Step(30 * time.Second)
	s.awaitOther(first)
}

func TestBootstrap_RenewsOnNewAdminKubeconfig(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})

	for range 3 {
		s.awaitWatch()

		before := s.token()

		require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(bed)))
		s.awaitOther(before)
	}

	select {
	case <-s.ended:
		t.Error("Run returned although the API server endpoint and CA are unchanged")
	default:
	}
}

func TestBootstrap_RenewsOnNewAdminKubeconfigWhileDisconnected(t *testing.T) {
	for name, reboots := range map[string]bool{"watch broke": false, "Talos restarted": true} {
		t.Run(name, func(t *testing.T) {
			bed := beds.NewSuite(t)
			s := bootstrapped(bed, clock.RealClock{})
			s.awaitWatch()

			before := s.token()

			if s.machine.BreakStreams(); reboots {
				require.NoError(t, s.machine.Stop(t.Context()))
			}

			require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(bed)))
			s.machine.Start()
			s.awaitOther(before)
		})
	}
}

// rotatingAdmin issues a new kubeconfig between the first read and the watch.
type rotatingAdmin struct {
	bootstrap.Admin

	issue func()
}

func (a *rotatingAdmin) WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error {
	if a.issue != nil {
		a.issue()
		a.issue = nil
	}

	return a.Admin.WatchLocalhostAdminKubeconfig(ctx, ch)
}

func TestBootstrap_RenewsOnAdminKubeconfigIssuedBeforeWatch(t *testing.T) {
	bed := beds.NewSuite(t)
	s := newSuite(bed, bed.Kube.Kubeconfig())
	second := anotherAdmin(bed)

	s.admin.Admin = &rotatingAdmin{Admin: s.admin.Admin, issue: func() {
		assert.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), second))
	}}
	s.start(clock.RealClock{})
	ctest.Eventually(t, "second admin kubeconfig is used", func() bool { return s.admin.reads.Load() >= 2 })
}

func TestBootstrap_IgnoresOtherTalosSecrets(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})
	s.awaitWatch()
	ctest.Eventually(t, "watch has sent the initial state", func() bool { return s.admin.events.Load() > 0 })

	reads, events := s.admin.reads.Load(), s.admin.events.Load()

	require.NoError(t, safe.StateModify(t.Context(), s.machine.State(), secrets.NewKubernetes(), func(r *secrets.Kubernetes) error {
		r.TypedSpec().SchedulerKubeconfig = "another"

		return nil
	}))

	ctest.Eventually(t, "change was observed", func() bool { return s.admin.events.Load() > events })

	for range 2 {
		before := s.token()

		require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(bed)))
		s.awaitOther(before)
		s.awaitWatch()
	}

	assert.EqualValues(t, 2, s.admin.reads.Load()-reads)
}

func TestBootstrap_ReturnsOnNewAPIServerCA(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})
	s.awaitWatch()

	require.NoError(t, bed.Kube.RotateServingCA(t.Context()))

	began := time.Now()

	require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), bed.Kube.Kubeconfig()))
	ctest.Receive(t, s.ended, "Run returns")
	t.Logf("new kubeconfig written after %s", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks()

	// The next run uses the new CA.
	s.start(clock.RealClock{})
	s.awaitReady()
	s.requireWorks()
}

func TestBootstrap_ClosesAdminConnections(t *testing.T) {
	bed := beds.NewSuite(t)
	admin := bed.Kube.Config()
	proxy := ctest.NewProxy(t, admin)
	s := newSuite(bed, kube.Kubeconfig(admin))
	s.start(clock.RealClock{})
	s.awaitReady()

	require.NotZero(t, proxy.Accepted.Load())

	ctest.Eventually(t, "no connection is open", func() bool { return proxy.Open.Load() == 0 })
}

// TestBootstrap_PrefersLocalAPIServer first disables KubePrism, as Talos does for up to a minute after an API server was
// down, and then the local API server.
func TestBootstrap_PrefersLocalAPIServer(t *testing.T) {
	bed := beds.NewSuite(t)
	admin := bed.Kube.Config()
	prism := ctest.NewProxy(t, admin)
	s := newSuite(bed, kube.Kubeconfig(admin))
	s.local = strings.TrimPrefix(bed.Kube.Endpoint(), "https://")
	prism.Hangs.Store(true)
	s.start(clock.RealClock{})
	s.awaitReady()
	assert.Zero(t, prism.Accepted.Load(), "requests to KubePrism")

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	require.NoError(t, err)
	config.Wrap(s.sut.PreferLocal)

	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)

	create := func(name string) error {
		_, err := client.CoreV1().Events("default").Create(t.Context(), &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: name}, InvolvedObject: corev1.ObjectReference{Namespace: "default"},
		}, metav1.CreateOptions{})

		return err
	}

	require.NoError(t, create("local"))
	assert.Zero(t, prism.Accepted.Load(), "requests to KubePrism")

	free, err := kube.ReservePort()
	require.NoError(t, err)
	t.Cleanup(free.Release)

	prism.Hangs.Store(false)

	s.local = free.Address()

	before := s.token()
	s.awaitWatch()
	require.NoError(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), append(kube.Kubeconfig(admin), "\n# again\n"...)))
	s.awaitOther(before)
	require.NoError(t, create("fallback"))
	assert.NotZero(t, prism.Accepted.Load(), "requests to KubePrism")
}
